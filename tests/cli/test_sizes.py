"""Options take sizes as people write them."""

import pytest

from raycheck.cli.options import bytes_of
from raycheck.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("50kB", 50_000),
        ("50KB", 50_000),
        ("50kb", 50_000),
        ("50K", 50_000),
        ("50KiB", 51_200),
        ("50kiB", 51_200),
        ("50kib", 51_200),
        ("1.5 GB", 1_500_000_000),
        ("2gi", 2 << 30),
        ("3TIB", 3 << 40),
        ("1PB", 10**15),
        ("7", 7),
        ("7b", 7),
    ],
)
def test_a_size_is_read_in_every_unit_that_people_write(text: str, count: int) -> None:
    assert bytes_of(text, option="--free") == count


@pytest.mark.parametrize("text", ["50Mb", "50Gib", "0", "much", "-1GB", "5XB", "1e3"])
def test_a_size_that_may_mean_bits_or_is_none_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--free {text}: give a size above 0, such as 50GB or 128MiB"):
        bytes_of(text, option="--free")
