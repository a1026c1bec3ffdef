"""Promises of subjects.py."""

import pytest

from kvstore.protocol.errors import Denied, Unauthorized, Untrusted
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, SERVER_NODE, Hello, Welcome
from kvstore.security.identity import ANONYMOUS, UNAUTHENTICATED, Identity, IdentityKind, Role
from kvstore.security.tls.subjects import (
    ANY,
    CLIENT,
    MASTER,
    NODE,
    CertificateSubject,
    CertifiedPeer,
    caller_identity,
    check_has,
    check_hello,
    check_welcome,
    client_identity,
    combine_identities,
    node_identity,
    peer_of,
)


@pytest.mark.parametrize(
    ("subject", "uri"),
    [
        (CertificateSubject(MASTER), "kvstore://master"),
        (CertificateSubject(NODE, "rack 1/node"), "kvstore://node/rack%201%2Fnode"),
        (CertificateSubject(NODE, ANY), "kvstore://node/*"),
        (CertificateSubject(CLIENT, ""), "kvstore://client/"),
        (CertificateSubject(CLIENT, "größe"), "kvstore://client/gr%C3%B6%C3%9Fe"),
    ],
)
def test_a_subject_is_a_uri_and_the_uri_that_subject(subject: CertificateSubject, uri: str) -> None:
    assert subject.uri() == uri
    assert peer_of(["node-1.example", "10.0.0.1", uri]) == CertifiedPeer((subject,))


@pytest.mark.parametrize(
    "other",
    ["kvstore://", "kvstore://masters", "kvstore://master/x", "kvstore://node", "kvstore://node/%2A", "spiffe://node/x", "node/x", ""],
)
def test_what_is_not_of_that_form_is_nobody(other: str) -> None:
    assert peer_of([other]) == CertifiedPeer(())


def certified(*uris: str) -> CertifiedPeer:
    return peer_of(uris)


def test_a_name_is_that_one_and_a_star_any() -> None:
    one, every = certified("kvstore://node/one", "kvstore://master"), certified("kvstore://node/*")
    assert (one.is_a(NODE, "one"), one.is_a(NODE, "two"), one.is_a(CLIENT, "one"), one.is_a(MASTER)) == (True, False, False, True)
    assert (every.is_a(NODE, "two"), every.is_a(MASTER), every.has(NODE), every.has(CLIENT)) == (True, False, True, False)
    assert str(one) == "kvstore://node/one and kvstore://master"
    assert str(certified()) == "nothing of kvstore's"


def test_a_certificate_for_something_else_is_not_trusted() -> None:
    check_has(certified("kvstore://master"), (MASTER, NODE), "m")
    with pytest.raises(
        Untrusted,
        match=r"^the certificate of h:1 is for kvstore://client/red, and kvstore://master or kvstore://node/NAME is required: create "
        r"one with `kvstore certs`$",
    ):
        check_has(certified("kvstore://client/red"), (MASTER, NODE), "h:1")


def test_hello_and_welcome_must_match_the_certificate() -> None:
    node, client = Hello(ROLE_NODE, name="one"), Hello(ROLE_CLIENT, "red")
    for hello in (node, client):
        check_hello(None, hello)
    check_hello(certified("kvstore://node/one"), node)
    check_hello(certified("kvstore://client/red"), client)
    check_hello(certified("kvstore://client/red"), Hello(9))  # not covered by certificates
    with pytest.raises(Unauthorized, match=r"kvstore://node/two, and node 'one' introduces itself"):
        check_hello(certified("kvstore://node/two"), node)
    with pytest.raises(Unauthorized, match="kvstore certs node"):
        check_hello(certified("kvstore://client/red"), node)
    with pytest.raises(Unauthorized, match=r"kvstore://client/blue, and a client of tenant 'red' introduces itself"):
        check_hello(certified("kvstore://client/blue"), client)
    with pytest.raises(Unauthorized, match="kvstore certs client"):
        check_hello(certified("kvstore://node/*"), client)


def test_nobody_answers_as_another_than_his_certificate_says() -> None:
    master, node = Welcome(SERVER_MASTER, "m"), Welcome(SERVER_NODE, "one")
    for welcome in (master, node):
        check_welcome(None, welcome)
    check_welcome(certified("kvstore://master"), master)
    check_welcome(certified("kvstore://node/one"), node)
    check_welcome(certified("kvstore://node/one"), Welcome(9, "x"))
    with pytest.raises(Untrusted, match=r"kvstore://node/one, and a master introduces itself"):
        check_welcome(certified("kvstore://node/one"), master)
    with pytest.raises(Untrusted, match=r"kvstore://node/two, and node 'one' introduces itself"):
        check_welcome(certified("kvstore://node/two"), node)


RED = Identity(IdentityKind.TENANT, Role.WRITE, "red")


def peer_for(*uris: str) -> CertifiedPeer:
    return peer_of(uris)


def test_client_certificate_is_its_tenants_any_is_operators() -> None:
    red, every = peer_for("kvstore://client/red"), peer_for("kvstore://client/*")
    assert client_identity(red, "red", "") == client_identity(red, "red", "a token") == RED
    assert client_identity(red, "blue", "") is client_identity(None, "red", "") is client_identity(every, "", "an operator's token") is None
    assert client_identity(every, "red", "") == Identity(IdentityKind.TENANT, Role.ADMIN, "red")
    assert client_identity(every, "", "") == Identity(IdentityKind.TENANT, Role.ADMIN)


def test_a_nodes_certificate_is_that_node() -> None:
    assert node_identity(peer_for("kvstore://node/one"), "one") == Identity(IdentityKind.NODE, name="one")
    assert node_identity(peer_for("kvstore://node/one"), "two") is node_identity(None, "one") is None


def test_a_caller_is_whom_his_certificate_names() -> None:
    one, every = peer_for("kvstore://node/one"), peer_for("kvstore://node/*")
    assert caller_identity(None, "red") is None
    assert caller_identity(one, "") == Identity(IdentityKind.NODE, name="one")
    assert caller_identity(every, "") == Identity(IdentityKind.NODE)
    assert caller_identity(peer_for("kvstore://client/red"), "red") == caller_identity(peer_for("kvstore://client/red"), "") == RED
    assert caller_identity(peer_for("kvstore://client/*"), "") == Identity(IdentityKind.TENANT, Role.ADMIN)
    assert caller_identity(peer_for("kvstore://master"), "") == UNAUTHENTICATED
    with pytest.raises(Unauthorized, match=r"is for kvstore://node/one, and a client of tenant 'red' calls"):
        caller_identity(one, "red")


def test_what_is_shown_together_goes_as_far_as_both_do() -> None:
    one, other = Identity(IdentityKind.NODE, name="one", credential="c"), Identity(IdentityKind.NODE, name="two")
    every = Identity(IdentityKind.NODE, credential="c")
    assert combine_identities(one, None) == one
    assert combine_identities(ANONYMOUS, RED) == RED
    assert combine_identities(every, Identity(IdentityKind.NODE, name="one")) == one
    assert combine_identities(one, Identity(IdentityKind.NODE)) == one
    assert combine_identities(RED, RED) == RED
    with pytest.raises(Denied, match="the certificate is of node 'two', the token of node 'one'"):
        combine_identities(one, other)
