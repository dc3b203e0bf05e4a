"""Tests that processes hold no more after a thousand saves and fifty restores than before."""

import pytest

from tests.long.soak import Soaked, soak
from tests.support.processes.background_call import InThread

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
SAVES = 1000
SOAK_S = 900.0  # the limit of a single test does not hold for what all share
MOST_GROWN = {"memory_mb": 24.0, "threads": 3.0, "files": 1.0, "sockets": 3.0}
"""Between the second quarter and the last. A buffer that stays behind at each restore would be 50 MB."""


@pytest.fixture(scope="module", params=["obstore", "s3fs"])
def soaked(request: pytest.FixtureRequest, cluster: None, s3: str) -> Soaked:
    return InThread(lambda: soak(s3, engine=request.param, saves=SAVES)).join(SOAK_S)


@pytest.mark.parametrize("kind", MOST_GROWN)
def test_nothing_is_held_that_was_not_held_before(soaked: Soaked, kind: str) -> None:
    assert soaked.saves == SAVES

    grown = {name: by[kind] for name, by in soaked.growth().items()}

    assert max(grown.values()) <= MOST_GROWN[kind], grown
