"""The messages between the ranks and the coordinator: plain, frozen values, which are pickled on the way.

A rank sends a `Report`, its holdings, a `RankRestore` or a `HeartbeatMessage`. It gets what all ranks get (an
`Outcome`, an agreement, a `RestoreDecision`), or `Pending`, in which case it asks again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.manifest import Component
from raycheck.bucket.protocol.sharing.base_run import BaseOffer, Wanted
from raycheck.bucket.reading import Documents
from raycheck.data.proof_agreement import SourceProof
from raycheck.errors import RaycheckError
from raycheck.settings import Alerts
from raycheck.transfer.stage.shared_memory import MemoryPlace

OnCorrupt = Literal["previous", "raise"]
NodeCheck = Literal["before the claim", "beside the claim", "done"]
"""When the first rank of a node checks what it may do in the bucket. This rank does so before it asks for a driver's
first claim, which may fence another driver; the other ranks wait for it. Later claims fence nobody.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """The answer that nothing is decided yet, so that the rank asks again. message: which ranks are missing."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldShard:
    """A complete shard in the memory of a node's actor. place: where other processes of its node find it; None when
    they have to ask the actor for its bytes.
    """

    size_bytes: int
    place: MemoryPlace | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The holder of a shard: a node, the handle of its actor, and where processes of that node find the shard."""

    node: str
    actor: Any
    place: MemoryPlace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOffer:
    """A memory checkpoint that a new group can restore, newer than the checkpoints in the bucket.

    entry: as if it were in `latest`. contents: a HeldCheckpoint, as `Group.fetch` takes it: each rank is told the
    place, since all shards of all ranks are too much to tell each of them.
    """

    entry: Entry
    contents: list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldCheckpoint:
    """The documents of a memory checkpoint, and the holders of each of its shards, by key."""

    documents: Documents
    holders: Mapping[str, Sequence[Holder]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The answer to a claim: the attempt, and the one checkpoint that all its ranks restore.

    attempt: its number. restore: the checkpoint; None to start fresh. documents: the checkpoint's, as `Group.fetch`
    takes them; empty when each rank has to read them from the bucket. claims: when the run's listed
    attempts began, in unix seconds by the store's clock; this attempt's comes last. resume: what the end of the
    previous attempt cost, if nothing is restored; a restore gets it in its RestoreDecision. is_finished: the run had
    ended with that checkpoint. refused: newer checkpoints that a rank of this attempt has found damaged, each with the
    proof. memory: the memory checkpoint that is restored in place of `restore`; None for none.
    """

    attempt: int
    restore: Entry | None
    documents: list[Any]
    claims: tuple[float, ...]
    resume: ResumeRecord | None = None
    is_finished: bool = False
    refused: tuple[str, ...] = ()
    memory: MemoryOffer | None = None

    @property
    def entry(self) -> Entry | None:
        """Return the checkpoint that all ranks restore, wherever it is stored; None to start fresh."""
        return self.memory.entry if self.memory is not None else self.restore


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The answer to all ranks on how a save ended.

    key: the checkpoint's name. message: why the save failed. must_agree_again: the ranks have to compare their replicas
    before the next save, because more than one of them wrote the same box. places: for each component of a committed
    checkpoint, the checkpoint whose directory has it; empty when the coordinator does not know. unnamed: why a
    committed checkpoint did not get the name that its save asked for; "" when it did, or asked for none.
    forgets_references: the save failed because it referred to components that not all ranks refer to, or that are no
    longer held or have disappeared; the next save uploads them. is_cured_by_next: an object to which it referred has
    disappeared. Until the next save has uploaded it again, it may be that no checkpoint can be restored.
    """

    kind: Literal["committed", "superseded", "failed"]
    key: str
    message: str = ""
    must_agree_again: bool = False
    places: Mapping[str, str] = field(default_factory=dict)
    unnamed: str = ""
    forgets_references: bool = False
    is_cured_by_next: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanWanted:
    """The request that a rank repeat its report with the plan, whose hash this coordinator does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """The position that a rank's restore has reached, and what the restore cost.

    trained_s: seconds of training in the restored state, as in the manifest. seconds: from the claim until the restore
    was done. what: the rank's restore report in words. defers: the rank reads tensors of optimizers only now.
    """

    step: int = 0
    trained_s: float = 0.0
    seconds: float = 0.0
    bytes_fetched: int = 0
    what: str = "nothing was restored"
    defers: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRestore:
    """The report to the coordinator on how one rank's restore of checkpoint `key`, or its peek at it, ended.

    damage: the proof that the checkpoint is damaged. failure: any other error. A rank with neither has succeeded, and
    its `arrival` counts. is_deferred: this is about what the rank has read after its restore had returned.
    """

    group: str
    rank: int
    world_size: int
    key: str
    damage: str = ""
    failure: RaycheckError | None = None
    arrival: Arrival = Arrival()
    on_corrupt: OnCorrupt = "previous"
    is_peek: bool = False
    is_deferred: bool = False

    @property
    def what(self) -> str:
        """Return in words what the rank did, for errors."""
        return f"{'peek at' if self.is_peek else 'restore of'} {self.key}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProof:
    """The result of one rank's check of its data source.

    stream: the name of the state's entry that is the stream of data; None when the state has none. proof: None when the
    rank proves nothing.
    """

    group: str
    rank: int
    world_size: int
    stream: str | None
    proof: SourceProof | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreDecision:
    """The answer to all ranks on whether their restore, or their peek, is over.

    claim: names the checkpoint to read instead, and `message` says why; None: all have succeeded. resume: what the end
    of the previous attempt cost.
    """

    claim: Claim | None = None
    resume: ResumeRecord | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """The report to the coordinator that a rank has failed and will ask for nothing more.

    error: an error that is not one of raycheck's classes is replaced by a StoreError that names its class. saves: how
    many saves the rank had begun; they may still succeed.
    """

    group: str
    rank: int
    error: RaycheckError
    saves: int = 0

    @property
    def told(self) -> RaycheckError:
        """Return the error that the other ranks are told: it names the rank."""
        name, text = f"rank {self.rank}: ", str(self.error)
        return type(self.error)(text if text.startswith(name) else name + text)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseWish:
    """One rank's question: which of the frozen components that its group is about to save does the run at `uri` have?

    replicas: the names of the tensors that this rank has whole, as others may have them.
    """

    group: str
    rank: int
    world_size: int
    uri: str
    wanted: Wanted
    replicas: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseMatch:
    """The result of one rank's comparison of its tensors with those that were offered.

    problems: for each component that differs, or could not be read, why.
    """

    group: str
    rank: int
    world_size: int
    offer: BaseOffer
    problems: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseAnswer:
    """The answer to all ranks: what the base offers, or after the comparison, which components of it the run refers to.

    offer: None for nothing. replicas: the tensors that all ranks have whole, so that one of them compares each.
    components: the records of those that are referred to. problem: why others are not.
    """

    offer: BaseOffer | None = None
    replicas: frozenset[str] = frozenset()
    components: tuple[Component, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatMessage:
    """Rank 0's message to the coordinator, about once a second, on how far it is.

    step: completed steps. trained_s: seconds of training that these steps took, without those that were lost. step_s:
    seconds of the last step. began_at: when the run began, in unix seconds by the store's clock. begun: the step of the
    newest save that rank 0 has begun; -1 for none. failed, skipped: how many saves of this attempt were.
    alerts: the settings, which a coordinator that was started again does not know.
    """

    step: int
    trained_s: float
    step_s: float = 0.0
    began_at: float
    begun: int = -1
    failed: int = 0
    skipped: int = 0
    alerts: Alerts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """A rank's message that its upload or restore is not over yet, sent only by one that takes long.

    save: the number of the save; None for a restore. wanted_bytes: None while it is not known. object: the one that has
    been at hand for longest; "" when none is. seconds: since the upload or the restore began. is_deferred: the restore
    has returned already, and this is about what it has left for later.
    """

    group: str
    rank: int
    world_size: int
    node: str
    checkpoint: str
    save: int | None
    done_bytes: int
    wanted_bytes: int | None
    object: str
    seconds: float
    is_deferred: bool = False

    @property
    def share(self) -> float:
        """Return the share that is done. It is 1 only when nothing is at hand any more."""
        if self.wanted_bytes is None:
            return 0.0
        most = 0.99 if self.object else 1.0
        return min(most, self.done_bytes / self.wanted_bytes) if self.wanted_bytes else most


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """Rank 0's metrics of steps that no report of a save has. rows, sent_at: see Report."""

    attempt: int
    rows: Mapping[str, tuple[Sequence[int], Sequence[float]]]
    sent_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailure:
    """A failed save of rank 0, as all ranks count it.

    save: its number in its attempt. in_a_row: how many saves in a row have failed. limit: how many end the training.
    """

    attempt: int
    save: int
    step: int
    message: str
    in_a_row: int
    limit: int
