"""Reads the preemption notices of each cloud, following its documentation; nothing here was tested on a real cloud.

Ranks never ask a cloud: they receive these notices from Ray (on_ray/api/preemption_notices.py), once the node drains.
A source returns the notices that are pending now, and repeats them at every request. watch.py decides which are new and
how to act on them. Every method raises ConnectionError if the service does not answer, or its answer is not as
documented; it may be called again.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar

from raycheck.errors import ConfigError
from raycheck.on_ray.watch_node.metadata_service import ENDPOINT, TIMEOUT_S, MetadataResponse, ask, checked

T = TypeVar("T")
REBALANCE = "rebalance"
DETECT_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A pending notice. Two notices of equal kind and message are the same.

    deadline: unix seconds at which the machine may be gone; None if the cloud does not say.
    """

    cloud: str
    kind: str
    deadline: float | None
    message: str


class NoticeSource(Protocol):
    """A client of one cloud's metadata service."""

    endpoint: str

    def detect(self) -> bool:
        """Ask the endpoint, for a second at most. Return whether this cloud's service answers there."""

    def notices(self, now: float) -> tuple[Notice, ...]:
        """Ask for the pending notices. now: unix seconds, for clouds that report only how much time is left."""


class Ec2:
    """The client for Amazon EC2, with IMDSv2. A rebalance recommendation is a notice without a deadline.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html
    """

    TOKEN_TTL_S = 21600
    """The longest token lifetime that the service grants, in seconds."""

    def __init__(self, endpoint: str = ENDPOINT, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint = checked(endpoint)
        self._clock = clock
        self._token = ""
        self._renew_at = 0.0

    def detect(self) -> bool:
        return bool(self._new_token(timeout_s=DETECT_TIMEOUT_S))

    def notices(self, now: float) -> tuple[Notice, ...]:
        del now
        answer = self._get("spot/instance-action")
        if answer is not None:
            return (_read(answer, _interruption),)  # no further request: an error in it must not hide this
        answer = self._get("events/recommendations/rebalance")
        return () if answer is None else (_read(answer, _recommendation),)

    def _get(self, path: str) -> MetadataResponse | None:
        """Return the answer for an item, or None if EC2 does not have it, which means that nothing is pending."""
        url = f"{self.endpoint}/latest/meta-data/{path}"
        if self._clock() >= self._renew_at:
            self._new_token()
        answer = ask(url, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:  # expired early, as after a hibernation
            answer = ask(url, {"X-aws-ec2-metadata-token": self._new_token()})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise answer.unexpected()
        return answer

    def _new_token(self, *, timeout_s: float = TIMEOUT_S) -> str:
        url, ttl = f"{self.endpoint}/latest/api/token", str(self.TOKEN_TTL_S)
        hint = "; in a container the instance needs HttpPutResponseHopLimit 2"
        try:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": ttl}
            answer = ask(url, headers, method="PUT", timeout_s=timeout_s)
        except ConnectionError as error:
            raise ConnectionError(f"{error}{hint}") from None
        if answer.status != 200 or not answer.text.isprintable() or not answer.text:
            raise answer.unexpected("; is the instance's metadata service turned on?")
        self._token, self._renew_at = answer.text, self._clock() + self.TOKEN_TTL_S / 2
        return self._token


class Gce:
    """The client for Google Compute Engine. `preempted` turns TRUE at most 30 s before the end.

    With --preemption-notice-duration=120s it does so 120 s before, but the service does not report which: 30 s are
    assumed. A VM with GPUs gets notice of host maintenance an hour ahead. A VM that will be migrated keeps running and
    gets no notice.

    https://cloud.google.com/compute/docs/instances/create-use-spot
    https://cloud.google.com/compute/docs/gpus/gpu-host-maintenance
    https://cloud.google.com/compute/docs/metadata/querying-metadata
    """

    PREEMPTION_S = 30.0
    MAINTENANCE_S = 3600.0

    def __init__(self, endpoint: str = ENDPOINT) -> None:
        self.endpoint = checked(endpoint)

    def detect(self) -> bool:
        return self._get("preempted", timeout_s=DETECT_TIMEOUT_S) in {"TRUE", "FALSE"}

    def notices(self, now: float) -> tuple[Notice, ...]:
        if self._get("preempted") == "TRUE":
            text = "Compute Engine preempts this VM"
            return (Notice(cloud="gce", kind="preempted", deadline=now + self.PREEMPTION_S, message=text),)
        if self._get("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            text = "Compute Engine stops this VM for host maintenance"
            return (Notice(cloud="gce", kind="maintenance", deadline=now + self.MAINTENANCE_S, message=text),)
        return ()

    def _get(self, name: str, *, timeout_s: float = TIMEOUT_S) -> str:
        url = f"{self.endpoint}/computeMetadata/v1/instance/{name}"
        answer = ask(url, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        if answer.flavor != "Google":
            raise answer.unexpected("; it lacks the header Metadata-Flavor: Google")
        if answer.status != 200:
            raise answer.unexpected()
        return answer.text


class Azure:
    """The client for Azure's Scheduled Events. It reports those that name this VM and end it. A Freeze does not end it.

    An event that has started no longer has a time. The first request of a VM may take two minutes, since it turns on
    the service.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service
    """

    KINDS = ("Preempt", "Terminate", "Redeploy", "Reboot")
    FIRST_TIMEOUT_S = 130.0

    def __init__(self, endpoint: str = ENDPOINT) -> None:
        self.endpoint = checked(endpoint)
        self._name = ""
        self._timeout_s = self.FIRST_TIMEOUT_S

    def detect(self) -> bool:
        return bool(self._own_name(timeout_s=DETECT_TIMEOUT_S))

    def notices(self, now: float) -> tuple[Notice, ...]:
        del now
        name = self._own_name()
        answer = self._get("scheduledevents?api-version=2020-07-01", timeout_s=self._timeout_s)
        self._timeout_s = TIMEOUT_S
        return _read(answer, lambda found: tuple(self._ending(found["Events"], name)))

    def _ending(self, events: list[dict[str, Any]], name: str) -> list[Notice]:
        found = []
        for event in events:
            kind, at = event["EventType"], event.get("NotBefore")
            if kind in self.KINDS and name.lower() in [resource.lower() for resource in event["Resources"]]:
                deadline = _unix(parsedate_to_datetime(at)) if at else None
                text = f"Azure has scheduled {kind} of this VM, event {event['EventId']}"
                found.append(Notice(cloud="azure", kind=kind.lower(), deadline=deadline, message=text))
        return found

    def _own_name(self, *, timeout_s: float = TIMEOUT_S) -> str:
        """Ask for the name of this VM in events; an event is also sent to the other VMs of its group."""
        if not self._name:
            answer = self._get("instance/compute/name?api-version=2021-02-01&format=text", timeout_s=timeout_s)
            if not answer.text or not answer.text.isprintable():
                raise answer.unexpected()
            self._name = answer.text
        return self._name

    def _get(self, path: str, *, timeout_s: float) -> MetadataResponse:
        answer = ask(f"{self.endpoint}/metadata/{path}", {"Metadata": "true"}, timeout_s=timeout_s)
        if answer.status != 200:
            raise answer.unexpected()
        return answer


CLOUDS: dict[str, Callable[[str], NoticeSource]] = {"gce": Gce, "azure": Azure, "aws": Ec2}
"""Sources by cloud, the most reliably detected first: Google's answers carry a header, EC2's only a token."""


def source_of(cloud: str | None, endpoint: str = ENDPOINT) -> NoticeSource:
    """Return the source of the named cloud, or of the cloud whose service answers.

    Raises ConfigError when none does.
    """
    if cloud is not None:
        if cloud not in CLOUDS:
            raise ConfigError(f"--cloud {cloud}: there are: {', '.join(sorted(CLOUDS))}")
        return CLOUDS[cloud](endpoint)
    problems = []
    for make in CLOUDS.values():
        source = make(endpoint)
        try:
            if source.detect():
                return source
        except ConnectionError as error:
            problems.append(str(error))
    raise ConfigError(
        f"no metadata service of a known cloud answers at {endpoint}; give --cloud aws, azure or gce to wait for it "
        f"({'; '.join(problems)})"
    )


def _interruption(found: dict[str, str]) -> Notice:
    action, at = str(found["action"]), found["time"]
    text = f"EC2 will {action} this instance at {at}"
    return Notice(cloud="aws", kind=action, deadline=_unix(datetime.fromisoformat(at)), message=text)


def _recommendation(found: dict[str, str]) -> Notice:
    text = f"EC2 recommended at {found['noticeTime']} to leave this instance"
    return Notice(cloud="aws", kind=REBALANCE, deadline=None, message=text)


def _read(answer: MetadataResponse, read: Callable[[Any], T]) -> T:
    """Parse an answer as JSON with `read`. Raises ConnectionError for an answer that is not as documented."""
    try:
        return read(json.loads(answer.text))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise answer.unexpected(f" ({type(error).__name__}: {error})") from None


def _unix(at: datetime) -> float:
    """Return unix seconds. A time without a zone is in UTC, as the clouds document it."""
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
