"""What a check of a bucket has found out, as a value.

A check raises what it cannot go on with; `found` turns that into a finding, so that a list of findings and an error
always say the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from raycheck.errors import ConfigError, RaycheckError

State = Literal["ok", "advice", "unknown", "slow", "wrong"]
"""How bad a finding is. advice: nothing fails, but it costs money or safety. unknown: it could not be found out. slow:
it works, but training would notice. wrong: a run here would fail, or lose checkpoints; no training starts here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFinding:
    """One line of `raycheck doctor`.

    name: what was examined. state: see State. text: what was found out. cure: what to do about it; "" if the text says
    it, or there is nothing to do.
    """

    name: str
    state: State
    text: str
    cure: str = ""

    @property
    def sentence(self) -> str:
        """Return text and cure as one text, as an error says them."""
        return f"{self.text}. {self.cure}" if self.cure else self.text


def ok(name: str, text: str) -> BucketFinding:
    """Return the finding that everything is as it should be."""
    return BucketFinding(name=name, state="ok", text=text)


def found(name: str, check: Callable[[], Iterable[BucketFinding]]) -> tuple[BucketFinding, ...]:
    """Return the findings of a check. An error that it raises becomes a last finding of this name, which is wrong."""
    findings: list[BucketFinding] = []
    try:
        findings.extend(check())  # keeps those before an error
    except RaycheckError as error:
        findings.append(BucketFinding(name=name, state="wrong", text=str(error)))
    return tuple(findings)


def any_wrong(findings: Iterable[BucketFinding]) -> bool:
    """Return whether one of the findings is wrong."""
    return any(finding.state == "wrong" for finding in findings)


def refuse(where: object, findings: Iterable[BucketFinding]) -> None:
    """Raise ConfigError for the first finding that is wrong. where: the store, as messages show it."""
    for finding in findings:
        if finding.state == "wrong":
            raise ConfigError(f"{where}: {finding.name}: {finding.sentence}")
