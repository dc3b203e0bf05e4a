"""Lets the ranks of a new run refer to frozen components of its base run instead of uploading them. Step 39.

This is done once, before the first step, for what no restore has read from the bucket. Each byte of the base is read
and compared with the live tensors. If a base cannot be used, that costs an upload, and one line in the log.
"""

import time
from collections.abc import Mapping, Sequence

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConflictError, RaycheckError, StoreError
from raycheck.group.coordinator.messages import BaseAnswer, BaseMatch, BaseWish
from raycheck.group.group import Group, ask_until_decided
from raycheck.log import event, logger
from raycheck.state.train_state import TrainState
from raycheck.transfer.referred_component import ReferredComponent, difference, digests_of, wanted_of
from raycheck.transfer.stage.local_box import LocalBox

BASE_TIMEOUT_S = 3600.0
"""How long after the first rank the last one may finish comparing its tensors."""


def refer_to_base(group: Group, state: TrainState, uri: str, known: Sequence[str] = ()) -> None:
    """Refer to the frozen components of this run that the base run at `uri` has. Every rank calls it.

    known: components that a restore has found in the bucket. Raises ConfigError when the run at `uri` cannot be a base,
    and what ends the attempt.
    """
    began = time.monotonic()
    boxes = {name: own for name, own in state.frozen_components().items() if name not in known}
    try:
        answer, done = _compared(group, state, uri, boxes)
    except StoreError as error:
        answer, done = BaseAnswer(problem=str(error)), ()
    if group.rank:
        return
    borrowed = {part.name: sum(shard.size_bytes for shard in part.shards) for part in answer.components}
    if done:
        said = {"components": ",".join(done), "bytes": sum(borrowed.values()), "seconds": time.monotonic() - began}
        logger.info(event("not uploaded, since the base has it", base=shown_uri(uri), **said, run=group.uri))
    if not boxes and not known:
        logger.warning(event("the base is not used: nothing of this run is frozen", base=shown_uri(uri), run=group.uri))
    if left := sorted(boxes.keys() - set(done)):
        text = f"the base cannot be used, {', '.join(left)} will be uploaded: {answer.problem}"
        logger.warning(event(text, base=shown_uri(uri), run=group.uri))


def _compared(
    group: Group, state: TrainState, uri: str, boxes: Mapping[str, Sequence[LocalBox]]
) -> tuple[BaseAnswer, tuple[str, ...]]:
    """Ask, compare, and ask again. Return the last answer, and the components that are referred to."""
    wish = BaseWish(
        group=group.id,
        rank=group.rank,
        world_size=group.world_size,
        uri=uri,
        wanted={name: wanted_of(own) for name, own in sorted(boxes.items())},
        replicas=frozenset(
            box.name for own in boxes.values() for box in own if not box.is_unique and box.sizes == box.shape
        ),
    )
    answer = _ask(group, "offer_base", wish)
    if answer.offer is None:
        return answer, ()
    found: dict[str, ReferredComponent] = {}
    problems: dict[str, str] = {}
    try:
        checkpoint = Checkpoint(group.store.beside(answer.offer.way), answer.offer.entry)
        index = checkpoint.read_index(checkpoint.read_manifest(), values=False)
        for record in answer.offer.components:
            own = boxes[record.name]
            # The digests come first: what changes during the comparison shows at the save.
            found[record.name] = ReferredComponent.of(record, index, own, digests_of(own))
            mine = [box for box in own if box.name not in answer.replicas or _is_compared_by(group, box)]
            if different := difference(group.store, record, index, mine):
                problems[record.name] = f"{different} has other bytes in {answer.offer.entry.key}"
    except ConflictError:
        raise
    except (RaycheckError, OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        why = f"rank {group.rank}: {type(error).__name__}: {error}"
        problems = {record.name: why for record in answer.offer.components}
    match = BaseMatch(
        group=group.id, rank=group.rank, world_size=group.world_size, offer=answer.offer, problems=problems
    )
    answer = _ask(group, "match_base", match)
    for record in answer.components:
        state.components.refer_to(found[record.name])
    return answer, tuple(record.name for record in answer.components)


def _is_compared_by(group: Group, box: LocalBox) -> bool:
    """Return whether this rank compares a tensor that all ranks have. Before their first save, they compare replicas
    with each other.
    """
    return crc32(box.name.encode()) % group.world_size == group.rank


def _ask(group: Group, method: str, message: BaseWish | BaseMatch) -> BaseAnswer:
    answer: BaseAnswer = ask_until_decided(
        group, method, message, deadline=time.monotonic() + BASE_TIMEOUT_S, what="look at the base run"
    )
    return answer
