"""Promises of subjects.py."""

import socket

import pytest

from kvstore.protocol.errors import Unauthorized, Untrusted
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, SERVER_NODE, Hello, Welcome
from kvstore.security.tls.subjects import (
    ANY,
    CLIENT,
    MASTER,
    NODE,
    CertifiedPeer,
    Subject,
    check_has,
    check_hello,
    check_welcome,
    names_of,
    peer_of,
)
from kvstore.transfer.testing.waiting import PATIENCE_S, in_background
from tests.security.tls.certified import certificates, shared


@pytest.mark.parametrize(
    ("subject", "uri"),
    [
        (Subject(MASTER), "kvstore://master"),
        (Subject(NODE, "rack 1/node"), "kvstore://node/rack%201%2Fnode"),
        (Subject(NODE, ANY), "kvstore://node/*"),
        (Subject(CLIENT, ""), "kvstore://client/"),
        (Subject(CLIENT, "größe"), "kvstore://client/gr%C3%B6%C3%9Fe"),
    ],
)
def test_a_subject_is_a_uri_and_the_uri_that_subject(subject: Subject, uri: str) -> None:
    assert subject.uri() == uri
    assert peer_of(["node-1.example", "10.0.0.1", uri]) == CertifiedPeer((subject,))


@pytest.mark.parametrize(
    "other",
    ["kvstore://", "kvstore://masters", "kvstore://master/x", "kvstore://node", "kvstore://node/%2A", "spiffe://node/x", "node/x", ""],
)
def test_what_is_not_of_that_form_is_nobody(other: str) -> None:
    assert peer_of([other]) == CertifiedPeer(())


def test_of_what_ssl_tells_of_a_peers_certificate_the_names_are_taken() -> None:
    hosts = ("127.0.0.1", "node-1.example")
    with socket.create_server((hosts[0], 0)) as listener:
        near, far = socket.create_connection(listener.getsockname()), listener.accept()[0]
    server = certificates(shared().server(Subject(NODE, "one"), Subject(MASTER), hosts=hosts)).begin_from(far)
    serving = in_background(lambda: server.shake_hands(PATIENCE_S))
    client = certificates(shared().client()).connect(near, hosts[0], PATIENCE_S)
    serving.result(PATIENCE_S)
    told = client.getpeercert()
    client.close()
    server.close()
    assert told is not None
    assert sorted(names_of(told)) == ["127.0.0.1", "kvstore://master", "kvstore://node/one", "node-1.example"]
    assert set(peer_of(names_of(told)).subjects) == {Subject(NODE, "one"), Subject(MASTER)}
    assert names_of({}) == []


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
        match=r"^the certificate of h:1 is for kvstore://client/red, and one for kvstore://master or kvstore://node/NAME is needed: make "
        r"it with `kvstore certs`$",
    ):
        check_has(certified("kvstore://client/red"), (MASTER, NODE), "h:1")


def test_nobody_introduces_himself_as_another_than_his_certificate_says() -> None:
    node, client = Hello(ROLE_NODE, name="one"), Hello(ROLE_CLIENT, "red")
    for hello in (node, client):
        check_hello(None, hello)
    check_hello(certified("kvstore://node/one"), node)
    check_hello(certified("kvstore://client/red"), client)
    check_hello(certified("kvstore://client/red"), Hello(9))  # of whom certificates say nothing
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
