"""Promises of extra.py."""

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.router.extra import need


def test_a_package_that_is_there_is_no_error() -> None:
    need("json", "sidecar")


def test_a_missing_package_is_one_error_that_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError) as refused:
        need("no_such_package", "sidecar")
    assert str(refused.value) == "no_such_package is not installed, and this needs it: pip install '.[sidecar]' in the checkout of kvstore"
