"""Tests of peer_masters.py, with real masters: how one is asked by another."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvstore.master.catalogs.interface import MasterContact, PeerMaster
from kvstore.master.peer_masters import PeerMasters
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Unauthorized, Unavailable
from kvstore.security.tls.config import TlsSettings
from tests.credentials import JOIN, tokens_file
from tests.master.running import TIMEOUT_S, NodeSide, Places, master_in_thread
from tests.ports import free_ports
from tests.rpc.unanswering import black_hole
from tests.security.tls.certified import certificates, shared, swap

SHORT_S = 0.2
"""Of a question to which there is no answer."""


def key_of(places: Places) -> str:
    assert places.master is not None
    return places.master._authenticator.master_key


@contextmanager
def peer_masters(known: dict[str, PeerMaster], tls: TlsSettings | None = None) -> Iterator[PeerMasters]:
    found = PeerMasters(lambda: known, tls=certificates(tls) if tls is not None else None, peer_timeout_s=30.0)
    try:
        yield found
    finally:
        found.close()


def status(asked: PeerMasters, *, timeout_s: float = TIMEOUT_S) -> pb.StatusReply:
    found: pb.StatusReply = asked.call("m:1", "Status", pb.StatusRequest(), timeout_s=timeout_s)
    return found


def test_peer_with_the_key_may_call_all_and_gets_typed_errors(tmp_path: Path) -> None:
    with master_in_thread(tmp_path / "run", tokens=tokens_file(tmp_path)) as places:
        node = NodeSide(places, token=JOIN)
        with peer_masters({"m:1": PeerMaster("m", MasterContact(places.control, key_of(places)))}) as asked:
            assert [one.name for one in status(asked).nodes] == ["one"]
            assert status(asked).nodes[0].tiers, "an operator's view, not an anonymous one"
            told = asked.call("m:1", "Topologies", pb.TopologiesRequest(), timeout_s=TIMEOUT_S)
            assert [one.name for one in told] == ["one"], "a stream, in a list"
            with pytest.raises(InvalidArgument, match="there is no node 'two'"):
                asked.call("m:1", "Forget", pb.ForgetRequest(node="two"), timeout_s=TIMEOUT_S)
            with pytest.raises(InvalidArgument, match="there is no partition '3'"):
                asked.call("m:1", "Status", pb.StatusRequest(), partition=3, timeout_s=TIMEOUT_S)
        with (
            peer_masters({"m:1": PeerMaster("m", MasterContact(places.control, "guess"))}) as asked,
            pytest.raises(Unauthorized, match="the master key is not this master's"),
        ):
            status(asked)
        node.close()


@pytest.mark.parametrize("known", [{}, {"m:1": PeerMaster("m", MasterContact())}], ids=["gone", "of a release before"])
def test_who_is_not_known_is_not_asked(known: dict[str, PeerMaster]) -> None:
    with peer_masters(known) as asked, pytest.raises(Unavailable, match="the catalog has no contact"):
        status(asked)


def test_unresponsive_master_ends_calls_at_the_deadline(tmp_path: Path) -> None:
    with black_hole() as (host, port), peer_masters({"m:1": PeerMaster("m", MasterContact(f"{host}:{port}", "key"))}) as asked:
        with pytest.raises((Unavailable, DeadlineExceeded)):
            status(asked, timeout_s=SHORT_S)
    [port] = free_ports(1)
    known = {"m:1": PeerMaster("m", MasterContact(f"127.0.0.1:{port}", "key"))}
    with peer_masters(known) as asked:
        with pytest.raises(Unavailable):
            status(asked)
        for _ in range(2):
            with master_in_thread(tmp_path, control=f"127.0.0.1:{port}") as places:
                known["m:1"] = PeerMaster("m", MasterContact(places.control, key_of(places)))
                eventually_answered(asked)


def eventually_answered(asked: PeerMasters) -> None:
    """The pause after a connection that failed is a second at most."""
    failures = 0
    while True:
        try:
            status(asked)
        except KVStoreError:
            failures += 1
            assert failures < 10_000
        else:
            return


def test_a_connection_to_who_is_gone_is_closed(tmp_path: Path) -> None:
    with master_in_thread(tmp_path) as places:
        known = {
            "m:1": PeerMaster("m", MasterContact(places.control, key_of(places))),
            "o:1": PeerMaster("o", MasterContact("127.0.0.1:1", "")),
        }
        with peer_masters(known) as asked:
            with pytest.raises(Unavailable):
                asked.call("o:1", "Status", pb.StatusRequest(), timeout_s=TIMEOUT_S)
            status(asked)
            assert set(asked._channels) == {places.control, "127.0.0.1:1"}
            del known["o:1"]
            status(asked)
            assert set(asked._channels) == {places.control}


@pytest.mark.promise("observable")
def test_by_tls_a_master_is_one_by_its_certificate_too(tmp_path: Path) -> None:
    tls = shared().master()
    settings = {name: value for name, value in asdict(tls).items() if name.startswith("tls_")}
    with master_in_thread(tmp_path, **settings) as places:
        known = {"m:1": PeerMaster("m", MasterContact(places.control, key_of(places)))}
        with peer_masters(known, tls) as asked:
            assert status(asked).role == "owner"
        for other in (shared().client(), shared().node("n0")):
            with peer_masters(known, other) as asked, pytest.raises(Unauthorized, match="and a master calls"):
                status(asked)
        with peer_masters(known, replace(tls, tls_ca="", tls_require_client_cert=False)) as asked:
            with pytest.raises(Unavailable, match="set tls_ca at this master"):
                status(asked)


def test_a_certificate_that_was_exchanged_is_shown_from_then_on(tmp_path: Path) -> None:
    tls = shared().master()
    settings = {name: value for name, value in asdict(tls).items() if name.startswith("tls_")}
    own = shared().client()
    with (
        master_in_thread(tmp_path, **settings) as places,
        peer_masters({"m:1": PeerMaster("m", MasterContact(places.control, key_of(places)))}, own) as asked,
    ):
        with pytest.raises(Unauthorized):
            status(asked)
        swap(own, shared().master())
        assert status(asked).role == "owner"
