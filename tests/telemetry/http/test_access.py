"""Promises of access.py: without credentials only this host is let in, and no page of another site speaks through its reader's browser."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.security.identity import EVERYBODY
from kvstore.telemetry.http.access import Access, anybody, is_foreign, this_host_only, unexplained


def request(remote: str | None = "127.0.0.1", host: str = "127.0.0.1:7442", **headers: str) -> Any:
    return SimpleNamespace(remote=remote, host=host, headers=headers)


@pytest.mark.parametrize("remote", ["127.0.0.1", "127.8.9.1", "::1"])
def test_this_host_may_all(remote: str) -> None:
    assert this_host_only(request(remote)) is Access.ADMIN


@pytest.mark.parametrize("remote", ["10.0.0.1", "fe80::1%eth0", "::2", "", None, "localhost"])
def test_others_may_nothing(remote: str | None) -> None:
    assert this_host_only(request(remote)) is Access.NONE


@pytest.mark.parametrize("host", ["127.0.0.1:7442", "localhost:7442", "localhost", "[::1]:7442"])
def test_who_asks_by_an_address_or_from_a_page_of_this_server_is_not_foreign(host: str) -> None:
    assert this_host_only(request(host=host)) is Access.ADMIN
    assert not is_foreign(request(host=host))
    assert not is_foreign(request(host=host, Origin=f"http://{host}"))


def test_a_page_of_another_site_is_foreign() -> None:
    assert is_foreign(request(Origin="http://evil.example"))
    assert is_foreign(request(Origin="http://127.0.0.1:9999"))
    assert is_foreign(request(Origin="null"))


def test_a_name_of_elsewhere_that_means_this_host_is_foreign() -> None:
    """A page of evil.example, whose name was changed to 127.0.0.1, is of one origin with it for the browser."""
    assert this_host_only(request(host="evil.example:7442")) is Access.NONE
    assert this_host_only(request(host="evil.example:7442", Origin="http://evil.example:7442", Authorization="Bearer any")) is Access.NONE


def test_what_is_malformed_is_foreign() -> None:
    assert this_host_only(request(host="[::1")) is Access.NONE
    assert is_foreign(request(Origin="http://[x"))


def test_a_port_without_credentials_explains_nothing() -> None:
    assert unexplained(request("10.0.0.1", Authorization="Bearer any")) == ""


def test_a_daemon_without_credentials_of_the_cluster_knows_no_names() -> None:
    assert anybody(request()) is EVERYBODY
