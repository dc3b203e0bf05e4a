"""Answers the ranks of a group that ask for components of a base run (step 39): what it offers, and what they use.

Only a setting that cannot work ends a training here. If anything else goes wrong, the ranks are told why, and upload
what they have.
"""

import asyncio
from collections.abc import Callable, Sequence

from raycheck.bucket.format.latest import Latest
from raycheck.bucket.protocol.claim import Identity
from raycheck.bucket.protocol.sharing.base_run import BaseOffer, offer, reserve, way_to_base
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import kind_of, parse_uri, shown_uri, with_settings
from raycheck.bucket.store.retry import retry
from raycheck.errors import ConfigError, ConflictError, RaycheckError, StoreError
from raycheck.group.coordinator.messages import BaseAnswer, BaseMatch, BaseWish, Pending
from raycheck.group.coordinator.rendezvous import Rendezvous, RendezvousTable

RETRIES_S = (5.0, 10.0, 20.0, 40.0)
"""The pauses between attempts to get a hold: many runs may begin on one base at the same time."""


class BaseCalls:
    """One coordinator's calls about the base of its run."""

    def __init__(self, register: Register, me: Identity, table: RendezvousTable) -> None:
        self._register = register
        self._me = me
        self._table = table

    async def offer(self, wish: BaseWish, patience_s: float) -> BaseAnswer | Pending:
        """Record what a rank wants from the base, and wait a while for what the base offers to all of them."""
        rendezvous: Rendezvous[BaseWish, BaseAnswer]
        awaited = "asked for the base"
        rendezvous = self._table.meet(wish.group, "base offer", world_size=wish.world_size, awaited=awaited)
        rendezvous.arrive(wish.rank, wish)
        if rendezvous.is_due:
            wishes = [rendezvous.arrivals[rank] for rank in sorted(rendezvous.arrivals)]
            rendezvous.decide_later(asyncio.to_thread(self._offer, wishes))
        return await rendezvous.answer(patience_s)

    async def match(self, match: BaseMatch, patience_s: float) -> BaseAnswer | Pending:
        """Record the result of a rank's comparison, and wait a while for what the run refers to."""
        rendezvous: Rendezvous[BaseMatch, BaseAnswer]
        awaited = "compared the base"
        rendezvous = self._table.meet(match.group, "base match", world_size=match.world_size, awaited=awaited)
        rendezvous.arrive(match.rank, match)
        if rendezvous.is_due:
            matches = [rendezvous.arrivals[rank] for rank in sorted(rendezvous.arrivals)]
            rendezvous.decide_later(asyncio.to_thread(self._reserve, matches))
        return await rendezvous.answer(patience_s)

    def _offer(self, wishes: Sequence[BaseWish]) -> BaseAnswer:
        wish = wishes[0]
        store = self._register.store
        base = open_base(store, wish.uri)
        if any(other.wanted != wish.wanted for other in wishes):
            return BaseAnswer(problem="the ranks do not hold parts of the same tensors, as in a pipeline")
        if not wish.wanted:  # nothing is frozen, or a restore has found all of it in the bucket
            return BaseAnswer()
        body = self._register.read_existing()[0]
        replicas = frozenset.intersection(*(other.replicas for other in wishes))
        return _or_why(lambda: BaseAnswer(offer=_held(store, base, wish, body), replicas=replicas))

    def _reserve(self, matches: Sequence[BaseMatch]) -> BaseAnswer:
        found = matches[0].offer
        problems = {name: why for match in matches for name, why in match.problems.items()}
        components = tuple(part for part in found.components if part.name not in problems)
        if not components:
            return BaseAnswer(problem=next(iter(problems.values())))

        def reserved() -> BaseAnswer:
            retry(lambda: reserve(self._register, self._me, components, found.loans), on=StoreError, pauses_s=RETRIES_S)
            return BaseAnswer(offer=found, components=components, problem="; ".join(problems.values()))

        return _or_why(reserved)


def open_base(store: Store, uri: str) -> Store:
    """Open the base at `uri`, with the settings of the run in `store`. Raises ConfigError when it cannot be a base."""
    if kind_of(uri) != kind_of(store.uri):
        raise ConfigError(f"SaveSettings(base=...): {shown_uri(uri)} and {store} are not in one bucket")
    base = open_store(with_settings(uri, parse_uri(store.uri).said))
    way_to_base(store, base)
    return base


def _held(store: Store, base: Store, wish: BaseWish, body: Latest) -> BaseOffer:
    return retry(lambda: offer(store, base, wish.wanted, run_id=body.run_id), on=StoreError, pauses_s=RETRIES_S)


def _or_why(ask: Callable[[], BaseAnswer]) -> BaseAnswer:
    """Return the answer, or why there is none. Raises what ends the attempt."""
    try:
        return ask()
    except ConflictError:
        raise
    except (RaycheckError, OSError) as error:
        return BaseAnswer(problem=str(error))
