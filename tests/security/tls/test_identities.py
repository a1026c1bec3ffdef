"""Promises of identities.py."""

import pytest

from kvstore.protocol.errors import Denied, Unauthorized
from kvstore.security.identity import EVERYBODY, STRANGER, Identity, Kind, Role
from kvstore.security.tls.identities import both, of_caller, of_client, of_node
from kvstore.security.tls.subjects import CertifiedPeer, peer_of

RED = Identity(Kind.TENANT, Role.WRITE, "red")


def certified(*uris: str) -> CertifiedPeer:
    return peer_of(uris)


def test_a_clients_certificate_is_its_tenant_and_that_of_all_an_operators() -> None:
    red, every = certified("kvstore://client/red"), certified("kvstore://client/*")
    assert of_client(red, "red", "") == of_client(red, "red", "a token") == RED
    assert of_client(red, "blue", "") is of_client(None, "red", "") is of_client(every, "", "an operator's token") is None
    assert of_client(every, "red", "") == Identity(Kind.TENANT, Role.ADMIN, "red")
    assert of_client(every, "", "") == Identity(Kind.TENANT, Role.ADMIN)


def test_an_identity_names_the_certificate_that_was_shown() -> None:
    red, node = peer_of(["kvstore://client/red"], b"f" * 32), peer_of(["kvstore://node/n1"], b"g" * 32)
    found = (of_client(red, "red", ""), of_caller(red, "red"), of_caller(red, ""), of_node(node, "n1"), of_caller(node, ""))
    assert [identity.certificate for identity in found if identity is not None] == [b"f" * 32] * 3 + [b"g" * 32] * 2


def test_a_nodes_certificate_is_that_node() -> None:
    assert of_node(certified("kvstore://node/one"), "one") == Identity(Kind.NODE, name="one")
    assert of_node(certified("kvstore://node/one"), "two") is of_node(None, "one") is None


def test_a_caller_is_whom_his_certificate_names() -> None:
    one, every = certified("kvstore://node/one"), certified("kvstore://node/*")
    assert of_caller(None, "red") is None
    assert of_caller(one, "") == Identity(Kind.NODE, name="one")
    assert of_caller(every, "") == Identity(Kind.NODE)
    assert of_caller(certified("kvstore://client/red"), "red") == of_caller(certified("kvstore://client/red"), "") == RED
    assert of_caller(certified("kvstore://client/*"), "") == Identity(Kind.TENANT, Role.ADMIN)
    assert of_caller(certified("kvstore://master"), "") == STRANGER
    with pytest.raises(Unauthorized, match=r"is for kvstore://node/one, and a client of tenant 'red' calls"):
        of_caller(one, "red")


def test_what_is_shown_together_goes_as_far_as_both_do() -> None:
    one, other = Identity(Kind.NODE, name="one", credential="c"), Identity(Kind.NODE, name="two")
    every = Identity(Kind.NODE, credential="c")
    assert both(one, None) == one
    assert both(EVERYBODY, RED) == RED
    assert both(every, Identity(Kind.NODE, name="one")) == one
    assert both(one, Identity(Kind.NODE)) == one
    assert both(RED, RED) == RED
    with pytest.raises(Denied, match="the certificate is of node 'two', the token of node 'one'"):
        both(one, other)
