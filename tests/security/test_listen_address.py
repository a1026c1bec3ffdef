"""Tests of listen_address.py."""

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.security.listen_address import check_listen_address, is_loopback


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("127.0.0.1", True), ("127.9.8.7", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("192.0.2.1", False)],
)
def test_only_the_loopback_is_out_of_reach(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 300])
def test_is_loopback_is_true_for_a_name_without_address(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("host", "is_authenticated", "is_allowed"), [("127.0.0.1", False, False), ("0.0.0.0", True, False), ("0.0.0.0", False, True)]
)
def test_listen_address_needs_loopback_authentication_or_flag(host: str, is_authenticated: bool, is_allowed: bool) -> None:
    check_listen_address("listen", host, is_authenticated=is_authenticated, allow_unauthenticated=is_allowed, mend="x")


@pytest.mark.promise("least-privilege")
def test_listen_address_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"^listen 0\.0\.0\.0 is not loopback, .*: give tokens \(.*\), or set allow_unauthenticated"):
        check_listen_address("listen", "0.0.0.0", is_authenticated=False, allow_unauthenticated=False, mend="give tokens")
