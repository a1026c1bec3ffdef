"""Promises of actor.py."""

import pytest

from kvstore.security.actor import CONTROL, THIS_MASTER, Actor, host_of
from kvstore.security.grpc_metadata import actor_from, on_behalf_of
from kvstore.security.identity import Identity, IdentityKind, Role


def test_actor_names_the_credential_and_the_address() -> None:
    actor = Actor.of(Identity(IdentityKind.OPERATOR, Role.ADMIN, "alice", "0123"), peer="10.0.0.7", via=CONTROL)
    assert actor == Actor("operator", "alice", "0123", "10.0.0.7", "control")
    assert str(actor) == "operator alice from 10.0.0.7"
    assert str(THIS_MASTER) == "master"
    assert Actor.from_dict(actor.to_dict()) == actor
    assert actor_from(on_behalf_of(actor)) == actor


@pytest.mark.parametrize(
    "fields", [None, [], {}, {"kind": "operator"}, {**THIS_MASTER.to_dict(), "name": 5}, {**THIS_MASTER.to_dict(), "x": ""}]
)
def test_actor_refuses_malformed_fields(fields: object) -> None:
    with pytest.raises(ValueError, match="not an actor"):
        Actor.from_dict(fields)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("ipv4:10.0.0.7:5123", "10.0.0.7"),
        ("ipv6:%5B::1%5D:5123", "::1"),
        ("10.0.0.7:5123", "10.0.0.7"),
        ("[::1]:5123", "::1"),
        ("unix:uid 1000 pid 7", "unix:uid 1000"),
        ("unix:", "unix:"),
        ("", ""),
    ],
)
def test_host_of_a_peer_has_no_port(address: str, host: str) -> None:
    assert host_of(address) == host
