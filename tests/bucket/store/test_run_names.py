"""Tests that the name of a run is a path below the storage path, and cannot lead anywhere else."""

import pytest

from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError


@pytest.mark.parametrize("name", [".", "..", "a/../b", "../b", "a/..", "./a"])
@pytest.mark.parametrize("uri", ["/runs", "file:///runs", "s3://bucket/runs?region=eu"])
def test_a_name_that_leads_elsewhere_is_refused(uri: str, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name for a run"):
        join_uri(uri, name)


def test_a_name_with_dots_and_slashes_is_taken() -> None:
    assert join_uri("s3://bucket/runs?region=eu", "team/..a/b..") == "s3://bucket/runs/team/..a/b..?region=eu"
