"""Promises of grpc_metadata.py."""

import pytest

from kvstore.security.actor import THIS_MASTER, Actor
from kvstore.security.grpc_metadata import (
    ACTOR,
    MASTER_KEY,
    TENANT,
    TOKEN,
    actor_from,
    as_metadata,
    from_metadata,
    master_key,
    on_behalf_of,
)


@pytest.mark.parametrize(("tenant", "token"), [("red", "secret"), ("", "join"), ("röd \x00", "\udcff"), ("red", "")])
def test_any_tenant_and_token_go_with_a_call_and_come_back(tenant: str, token: str) -> None:
    assert from_metadata([("user-agent", "grpc"), *as_metadata(tenant, token)]) == (tenant, token)


@pytest.mark.parametrize("metadata", [[(TOKEN, b"\xff")], [(TENANT, b"red")], [(TOKEN, "text")]], ids=["not UTF-8", "no token", "no bytes"])
def test_what_is_no_credential_is_none(metadata: list[tuple[str, str | bytes]]) -> None:
    assert from_metadata(metadata) is None


def test_a_masters_key_is_an_entry_of_its_own() -> None:
    assert master_key([("user-agent", "grpc"), (MASTER_KEY, "key")]) == "key"
    assert master_key([("user-agent", "grpc"), (TOKEN, b"key"), (MASTER_KEY, b"key")]) is None
    assert from_metadata([(MASTER_KEY, "key")]) is None


def test_operator_for_whom_a_master_asks_goes_along() -> None:
    alice = Actor("operator", "alice", peer="10.0.0.7", via="console")
    assert actor_from(on_behalf_of(alice)) == alice
    assert on_behalf_of(THIS_MASTER) == ()
    for damaged in (b"", b"{", b"[]", b"\xff"):
        assert actor_from([(ACTOR, damaged)]) == THIS_MASTER
