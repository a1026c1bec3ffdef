"""Tests of audit_trail.py: what does not arrive is kept, in its order. Of three masters: tests/system/test_audit.py."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.master import audit_trail
from kvstore.master.audit_trail import ForwardedEntries, Forwarder
from kvstore.master.catalogs.interface import MasterContact, PeerMaster
from kvstore.master.peer_masters import PeerMasters
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Closed, DeadlineExceeded
from kvstore.testing.transfer.awaited import eventually
from tests.master.running import TIMEOUT_S, Places, master_in_thread


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path) as found:
        yield found


class Sender:
    """A master whose entries go to another one, while that is known."""

    def __init__(self, places: Places) -> None:
        assert places.master is not None
        contact = MasterContact(places.control, places.master._authenticator.master_key)
        self.known: dict[str, PeerMaster] = {}
        self.owner = {"owner": PeerMaster("owner", contact)}
        self.waiting: list[pb.AuditEntry] = []
        self.put_back = threading.Semaphore(0)
        self.ends = False
        self._lock = threading.Lock()
        self.peer_masters = PeerMasters(lambda: self.known, tls=None, peer_timeout_s=TIMEOUT_S)
        self.forwarder = Forwarder(self.peer_masters, self.take, self.take_back)

    def take(self) -> ForwardedEntries | None:
        if self.ends:
            raise DeadlineExceeded("the loop is busy")
        with self._lock:
            entries, self.waiting = self.waiting, []
        return ForwardedEntries("owner", entries) if entries else None

    def take_back(self, entries: Sequence[pb.AuditEntry]) -> None:
        with self._lock:
            self.waiting = [*entries, *self.waiting]
        self.put_back.release()

    def add(self, *actions: str) -> None:
        with self._lock:
            self.waiting += [pb.AuditEntry(action=action) for action in actions]


def actions(places: Places) -> list[str]:
    master = places.master
    assert master is not None
    entries = master.reactor.call(lambda: master.partitions[0].role_manager.audit().after(0), deadline_s=TIMEOUT_S)
    return [entry.action for entry in entries]


def test_entries_wait_for_the_owner_and_arrive_in_their_order(
    places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit_trail, "INTERVAL_S", 0.01)
    monkeypatch.setattr(audit_trail, "MAX_SENT", 2)
    sender = Sender(places)
    sender.add("a", "b", "c")
    sender.forwarder.start()
    try:
        for _ in range(3):
            assert sender.put_back.acquire(timeout=TIMEOUT_S)
        assert caplog.text.count("audit entries wait for the owner of the catalog, at owner") == 1
        sender.add("d")
        sender.known = sender.owner
        eventually(lambda: actions(places) == ["a", "b", "c", "d"], "all have arrived")
        sender.ends = True
    finally:
        sender.forwarder.close()
        sender.peer_masters.close()


def test_entries_of_a_master_that_stops_are_in_its_log(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    def closed(_entries: Sequence[pb.AuditEntry]) -> None:
        raise Closed("the reactor is closed")

    sender = Sender(places)
    forwarder = Forwarder(sender.peer_masters, sender.take, closed)
    assert len(forwarder._send(ForwardedEntries("owner", [pb.AuditEntry()]))) == 1
    assert "1 audit entries are in this log only: the master stops" in caplog.text
    sender.peer_masters.close()
