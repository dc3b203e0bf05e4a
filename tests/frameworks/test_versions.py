"""A framework that is absent or too old is refused in one sentence that says what to run."""

import pytest

from raycheck.errors import ConfigError
from raycheck.frameworks.versions import require


def test_a_framework_of_the_tested_version_is_accepted() -> None:
    require("torch", "2.6", extra="train")


def test_an_absent_framework_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"no-such-framework is not installed.*: pip install 'raycheck\[hf\]'"):
        require("no-such-framework", "1.0", extra="hf")


def test_a_framework_that_is_too_old_is_refused_with_both_versions() -> None:
    with pytest.raises(ConfigError, match=r"torch .* is older than 1000\.0.*: pip install"):
        require("torch", "1000.0", extra="train")
