"""Promises of config.py: by default a daemon answers on a free port of this host only."""

from kvstore.rpc.address import Address, parse_address
from kvstore.telemetry.http.config import HTTP_DEFAULT, HTTP_HELP


def test_the_default_is_a_free_port_of_the_loopback_and_nothing_turns_it_off() -> None:
    assert parse_address(HTTP_DEFAULT) == Address("127.0.0.1", 0)
    assert "empty: none" in HTTP_HELP
