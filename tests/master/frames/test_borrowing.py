"""Promises of borrowing.py: who wants more than a partition's share of a limit waits for others to give, and is refused if they do not."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from kvstore.master.frames import borrowing, clients
from kvstore.master.frames.borrowing import Wish
from kvstore.master.roles.leading import Leading
from kvstore.protocol.errors import Full, KVStoreError, QuotaExceeded, Unavailable
from kvstore.protocol.master_messages import Cancel, Grants, Pin, Reserve
from kvstore.protocol.message import GRANTED
from kvstore.protocol.session_messages import Flags, Ok
from kvstore.rpc.channel import Channel
from kvstore.security.actor import THIS_MASTER
from kvstore.security.quotas.quota import RESERVATIONS
from kvstore.transfer.testing.waiting import eventually
from tests.master.blocks import Event
from tests.master.running import TIMEOUT_S, NodeSide, Places, ask, master_in_thread
from tests.rpc.wires import frame

QUOTA = "[tenants.red]\npins = 4\nreservations = 4\n"


@pytest.fixture
def quotas(tmp_path: Path) -> Path:
    file = tmp_path / "quotas.toml"
    file.write_text(QUOTA)
    return file


@pytest.fixture
def places(tmp_path: Path, quotas: Path) -> Iterator[Places]:
    """A master of two partitions, of which only the first one knows a node: two pins and two reservations are its even share."""
    with master_in_thread(tmp_path, partitions=2, quotas=str(quotas), reserve_ttl_s=3600.0, command_timeout_s=0.1) as found:
        node = NodeSide(found)
        node.sync(*(Event(bytes((key,))) for key in b"abcdefg"))
        yield found
        node.close()


@pytest.fixture
def client(places: Places) -> Iterator[Channel]:
    channel = places.client()
    yield channel
    channel.close()


def reserve(client: Channel, *keys: bytes) -> Grants:
    return ask(client, Reserve([*keys], [1] * len(keys)), Grants)


def leading(places: Places) -> Leading:
    """The first partition's."""
    master = places.master
    assert master is not None
    return master.partitions[0].standing.leading()


def pin_all(places: Places, namespace: str = "ns", *, pinned: bool = True) -> "Future[int]":
    """As an operator has the blocks of a namespace pinned, or let go."""
    master = places.master
    assert master is not None
    return master.reactor.call(lambda: leading(places).pin_all("red", namespace, THIS_MASTER, pinned=pinned), deadline_s=TIMEOUT_S)


def waiting_in(places: Places) -> int:
    master = places.master
    assert master is not None
    return master.reactor.call(lambda: len(leading(places)._borrowing._waiting), deadline_s=TIMEOUT_S)


def await_waiting(places: Places, count: int) -> None:
    eventually(lambda: waiting_in(places) == count, f"{count} that wait")


class Reserving(threading.Thread):
    """A Reserve that is said in a thread of its own."""

    def __init__(self, places: Places, *keys: bytes) -> None:
        super().__init__()
        self._channel, self._keys = places.client(), keys
        self.answer: Grants | KVStoreError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = reserve(self._channel, *self._keys)
        except KVStoreError as error:
            self.answer = error
        finally:
            self._channel.close()

    def result(self) -> Grants | KVStoreError | None:
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        return self.answer


def test_a_tenant_whose_keys_are_all_of_one_partition_has_its_whole_quota_of_both_limits_and_no_more(
    places: Places, client: Channel
) -> None:
    for key in (b"1", b"2", b"3", b"4"):
        assert reserve(client, key).statuses == bytes([GRANTED])
    with pytest.raises(QuotaExceeded, match="reservations"):
        reserve(client, b"5")
    assert ask(client, Pin([b"a", b"b", b"c"], 1), Flags) == Flags(b"\1\1\1")
    assert ask(client, Pin([b"d"], 1), Flags) == Flags(b"\1")
    with pytest.raises(QuotaExceeded, match="pins"):
        ask(client, Pin([b"e"], 1), Flags)
    assert ask(client, Pin([b"a"], 0), Flags) == Flags(b"\1")
    assert ask(client, Pin([b"e"], 1), Flags) == Flags(b"\1")


def test_more_than_the_whole_quota_is_refused_without_a_wait(places: Places, client: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    with pytest.raises(QuotaExceeded):
        reserve(client, *(bytes((key,)) for key in range(5)))


def test_who_waits_holds_up_nobody_and_has_what_becomes_free(places: Places, client: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    grants = reserve(client, b"1", b"2", b"3", b"4")
    waiting = Reserving(places, b"5", b"6")
    await_waiting(places, 1)
    blue = places.client("blue")
    assert reserve(blue, *(b"b%d" % number for number in range(9))).statuses == bytes([GRANTED]) * 9
    blue.close()
    assert ask(client, Cancel([b"1", b"2"], grants.generations[:2]), Ok) == Ok()
    answer = waiting.result()
    assert isinstance(answer, Grants)
    assert answer.statuses == bytes([GRANTED] * 2)


def test_what_else_is_wrong_by_then_is_the_answer(places: Places, client: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master grants no more meanwhile."""
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    grants = reserve(client, b"1", b"2", b"3", b"4")
    waiting = Reserving(places, b"5", b"6")
    await_waiting(places, 1)
    master = places.master
    assert master is not None
    reservations = master.partitions[0].standing.leading().directory._reservations
    monkeypatch.setattr(reservations, "_limit", 3)
    assert ask(client, Cancel([b"1", b"2"], grants.generations[:2]), Ok) == Ok()
    assert isinstance(waiting.result(), Full)


def test_who_has_waited_in_vain_is_refused_and_after_that_who_wants_the_same_at_once(
    places: Places, client: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowing, "QUIET_NS", 3600 * 1_000_000_000)
    reserve(client, b"1", b"2", b"3", b"4")
    with pytest.raises(QuotaExceeded):
        reserve(client, b"5")
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    with pytest.raises(QuotaExceeded):
        reserve(client, b"5")


def test_more_than_so_many_keys_do_not_wait(places: Places, client: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    monkeypatch.setattr(borrowing, "MAX_WAITING_KEYS", 4)
    grants = reserve(client, b"1", b"2", b"3", b"4")
    waiting = Reserving(places, b"5", b"6")
    await_waiting(places, 1)
    with pytest.raises(QuotaExceeded):
        reserve(client, b"7", b"8", b"9")
    assert ask(client, Cancel([b"1", b"2"], grants.generations[:2]), Ok) == Ok()
    assert isinstance(waiting.result(), Grants)


def test_more_than_so_many_wishes_do_not_wait(places: Places, client: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    monkeypatch.setattr(borrowing, "MAX_WAITING", 1)
    grants = reserve(client, b"1", b"2", b"3", b"4")
    waiting = Reserving(places, b"5")
    await_waiting(places, 1)
    with pytest.raises(QuotaExceeded):
        reserve(client, b"6")
    assert ask(client, Cancel([b"1"], grants.generations[:1]), Ok) == Ok()
    assert isinstance(waiting.result(), Grants)


def test_once_one_is_refused_only_who_wants_less_is_tried_and_all_are_told_in_the_end(places: Places) -> None:
    master, room = places.master, 0
    assert master is not None
    tried, refused = list[int](), list[str]()

    def act(wanted: int) -> None:
        tried.append(wanted)
        if wanted > room:
            raise QuotaExceeded(f"{wanted} are too many")

    def turns() -> None:
        nonlocal room
        wishes, now_ns = leading(places)._borrowing, master.reactor.now_ns()
        for wanted in (3, 4, 3, 2, 2, 1):
            refuse = lambda error: refused.append(str(error))  # noqa: E731
            wishes.attempt(Wish("red", RESERVATIONS, wanted, partial(act, wanted), refuse, lambda: True, lambda _why: None))
        tried.clear()
        room = 1
        wishes.tick(now_ns)
        assert (tried, refused) == ([3, 2, 1], [])
        tried.clear()
        wishes.tick(now_ns + 2 * borrowing.WAIT_NS)
        assert tried == [3, 2]
        assert refused == [f"{wanted} are too many" for wanted in (3, 4, 3, 2, 2)]

    master.reactor.call(turns, deadline_s=TIMEOUT_S)


def test_who_has_hung_up_waits_no_more(places: Places, client: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    reserve(client, b"1", b"2", b"3", b"4")
    sock = places.client().detach()
    sock.sendall(frame(Reserve([b"5"], [1]), 1))
    await_waiting(places, 1)
    sock.close()
    await_waiting(places, 0)


def test_an_owner_that_ends_hangs_up_on_who_waits(tmp_path: Path, quotas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    with master_in_thread(tmp_path, partitions=2, quotas=str(quotas)) as places:
        node, client = NodeSide(places), places.client()
        reserve(client, b"1", b"2", b"3", b"4")
        waiting = Reserving(places, b"5")
        await_waiting(places, 1)
    assert isinstance(waiting.result(), Unavailable)
    client.close()
    node.close()


# Pins of a namespace, a slice of its blocks at a time


def test_pins_of_a_namespace_take_what_others_have_of_the_limit(tmp_path: Path, quotas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "SLICE_ROWS", 3)
    quotas.write_text("[tenants.red]\npins = 7\n")
    with master_in_thread(tmp_path, partitions=2, quotas=str(quotas), command_timeout_s=0.1) as places:
        node = NodeSide(places)
        node.sync(*(Event(bytes((key,))) for key in b"abcdefg"))
        assert [pin_all(places).result(TIMEOUT_S) for _ in range(2)] == [7, 7]
        assert [pin_all(places, pinned=False).result(TIMEOUT_S) for _ in range(2)] == [7, 0]
        node.close()


def test_a_refusal_in_a_later_slice_is_told_to_who_asked_and_names_the_whole_limit(
    places: Places, client: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "SLICE_ROWS", 3)
    with pytest.raises(QuotaExceeded, match=r"exceed its quota of 4 \(pins\)"):
        pin_all(places).result(TIMEOUT_S)
    assert pin_all(places, pinned=False).result(TIMEOUT_S) == 2, "the first slice, of rows 0 to 2, stays pinned"


def test_pins_of_a_namespace_wait_for_what_becomes_free(places: Places, client: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    node = NodeSide(places, "two")
    node.sync(Event(b"x", namespace="other"))
    assert ask(client, Pin([b"a", b"b", b"c", b"d"], 1), Flags) == Flags(b"\1" * 4)
    pinning = pin_all(places, "other")
    await_waiting(places, 1)
    assert not pinning.done()
    assert ask(client, Pin([b"a"], 0), Flags) == Flags(b"\1")
    assert pinning.result(TIMEOUT_S) == 1
    node.close()


def test_an_owner_that_ends_tells_who_waits_for_pins_of_a_namespace(tmp_path: Path, quotas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "WAIT_NS", 3600 * 1_000_000_000)
    with master_in_thread(tmp_path, partitions=2, quotas=str(quotas), command_timeout_s=0.1) as places:
        node, client = NodeSide(places), places.client()
        node.sync(Event(b"x", namespace="other"), *(Event(bytes((key,))) for key in b"abcd"))
        assert ask(client, Pin([b"a", b"b", b"c", b"d"], 1), Flags) == Flags(b"\1" * 4)
        pinning = pin_all(places, "other")
        await_waiting(places, 1)
    with pytest.raises(Unavailable):
        pinning.result(TIMEOUT_S)
    client.close()
    node.close()
