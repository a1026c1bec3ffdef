"""Searches for the master that owns the catalog: in rounds without sockets, and with stub masters."""

import contextlib
import itertools
import threading
import time

import pytest

from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, KVStoreError, NoOwner, ProtocolError, Unauthorized, Unavailable
from kvstore.protocol.session_messages import ROLE_CLIENT, SERVER_MASTER, Hello, Welcome
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.owners import (
    MAX_NAMED,
    MAX_PAUSE_FACTOR,
    SKIP_FACTOR,
    Masters,
    OwnerSearchRound,
    await_owner,
    backoff_delays,
    find_owner,
    probe_delays,
)
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import eventually
from tests.garbage import assert_no_garbage
from tests.ports import free_ports
from tests.rpc.stub_masters import StubMaster, stub_masters

A, B, C = (Address(host, 1) for host in "abc")
HELLO = Hello(ROLE_CLIENT)


def standing_by(owner: str) -> Welcome:
    return Welcome(SERVER_MASTER, "m", owner=owner)


def known(*masters: StubMaster) -> Masters:
    return Masters([parse_address(master.address) for master in masters])


# --- addresses ---


def test_all_are_in_order_from_the_owner_on() -> None:
    masters = Masters([A, B, C])
    masters.owner = B
    assert masters.in_order() == [B, C, A]


def test_masters_know_given_and_latest_named_addresses() -> None:
    masters = Masters([A])
    assert masters.learn("a:1") == A
    assert not masters.has_several, "it was given"
    for number in (*range(MAX_NAMED), 0, MAX_NAMED):
        masters.learn(f"n:{number}")
    assert masters.has_several
    assert [address.port for address in masters.in_order()] == [1, *range(2, MAX_NAMED), 0, MAX_NAMED]
    masters.owner = B
    assert masters.in_order()[0] == B, "known however it was found"
    with pytest.raises(InvalidArgument):
        masters.learn("nonsense")


# --- a round ---


def test_each_is_asked_once_and_whom_it_names_next() -> None:
    masters = Masters([A, B, C])
    asking = OwnerSearchRound(masters)
    assert asking.next() == A
    assert not asking.is_owner(A, standing_by("c:1"))
    assert asking.next() == C
    asking.failed(C, Unavailable("cannot connect to c:1"))
    assert asking.next() == B
    assert asking.is_owner(B, Welcome(SERVER_MASTER, "m"))
    assert masters.owner == B


def test_masters_that_name_one_another_end_in_one_clear_error() -> None:
    asking = OwnerSearchRound(Masters([A, B]))
    for address, named in ((A, "b:1"), (B, "a:1")):
        assert asking.next() == address
        assert not asking.is_owner(address, standing_by(named))
    assert asking.next() is None
    with pytest.raises(Unavailable, match=r"^no master can be reached: a:1 follows the owner b:1; b:1 follows the owner a:1$"):
        raise asking.error()


@pytest.mark.promise("failover")
def test_a_chain_of_names_ends() -> None:
    asking = OwnerSearchRound(Masters([A]))
    count = 0
    while (address := asking.next()) is not None:
        count += 1
        assert not asking.is_owner(address, standing_by(f"n:{count}"))
    assert count == 1 + MAX_NAMED


def test_a_refusal_is_told_before_what_is_unavailable() -> None:
    asking = OwnerSearchRound(Masters([A, B, C]))
    failures: tuple[KVStoreError, ...] = (Unavailable("away"), ProtocolError("another version"), Unauthorized("no"))
    for address, failure in zip((A, B, C), failures, strict=True):
        asking.failed(address, failure)
    assert asking.next() is None
    assert (type(asking.error()), str(asking.error())) == (ProtocolError, "b:1: another version")


def test_pauses_double_up_to_a_limit() -> None:
    assert list(itertools.islice(backoff_delays(0.5), 6)) == [0.5, 1, 2, 4, 4, 4]
    assert MAX_PAUSE_FACTOR == 8


def test_silent_owner_is_waited_for_once_then_probed() -> None:
    assert list(itertools.islice(probe_delays(1.0), 4)) == [1.0, 0.25, 0.25, 0.25]
    assert list(itertools.islice(probe_delays(1.0, is_doubted=True), 2)) == [0.25, 0.25]


class Clock:
    """A clock in nanoseconds that the test advances."""

    def __init__(self) -> None:
        self.ns = 1

    def __call__(self) -> int:
        return self.ns


def wait_in_vain(masters: Masters, clock: Clock, address: Address, ns: int) -> None:
    asking = OwnerSearchRound(masters)
    clock.ns += ns
    asking.failed(address, DeadlineExceeded("no answer"))


def test_those_that_did_not_answer_are_asked_last_until_they_do() -> None:
    masters, clock = Masters([A, B, C]), Clock()
    for address in (A, B, B):
        wait_in_vain(masters, clock, address, 1)
    assert masters.in_order() == [C, A, B]
    assert list(map(masters.timeouts, (A, B, C))) == [1, 2, 0]
    OwnerSearchRound(masters).failed(A, Unavailable("cannot connect to a:1"))
    OwnerSearchRound(masters).is_owner(B, Welcome(SERVER_MASTER, "m"))
    assert masters.in_order() == [B, C, A]
    assert masters.timeouts(B) == 0


def test_silent_masters_are_tried_by_age_of_their_timeout() -> None:
    clock = Clock()
    masters = Masters([A, B, C], clock_ns=clock)
    for address in (B, A, C, B):
        wait_in_vain(masters, clock, address, 1)
    assert masters.in_order() == [A, C, B]


@pytest.mark.parametrize("says", [NoOwner("nobody owns the catalog"), standing_by("a:1")], ids=["nobody", "another"])
def test_round_that_knows_the_owner_skips_silent_masters(says: KVStoreError | Welcome) -> None:
    clock = Clock()
    masters = Masters([A, B, C], clock_ns=clock)
    wait_in_vain(masters, clock, B, 100)
    for passed_ns, asked_last in ((100 * SKIP_FACTOR - 1, None), (1, B)):
        clock.ns += passed_ns
        asking = OwnerSearchRound(masters)
        assert asking.next() == A
        asking.failed(A, Unavailable("cannot connect to a:1"))
        assert asking.next() == C
        if isinstance(says, Welcome):
            assert not asking.is_owner(C, says)
        else:
            asking.failed(C, says)
        assert asking.next() == asked_last


def test_silent_master_is_asked_if_named_or_no_owner_is_known() -> None:
    clock = Clock()
    masters = Masters([A, B, C], clock_ns=clock)
    wait_in_vain(masters, clock, B, 100)
    asking = OwnerSearchRound(masters, besides=A)
    assert asking.next() == C
    asking.failed(C, Unavailable("cannot connect to c:1"))
    assert asking.next() == B
    asking = OwnerSearchRound(masters)
    assert asking.next() == A
    asking.is_owner(A, standing_by("b:1"))
    assert asking.next() == B


# --- over sockets ---


def test_followers_lead_to_the_owner_which_is_asked_first_later() -> None:
    with stub_masters(3) as (first, second, owner):
        masters = known(first)
        for _ in range(2):
            channel = find_owner(masters, HELLO, Deadline(60), attempt_s=60)
            channel.close()
            assert str(channel.address) == owner.address
        assert [master.hellos for master in (first, second, owner)] == [1, 1, 2]


@pytest.mark.parametrize(("longest_s", "given_s"), [(25.0, [10, 20, 25, 25]), (0.0, [10, 10, 10, 10])])
def test_each_time_that_one_does_not_answer_it_is_given_longer(
    monkeypatch: pytest.MonkeyPatch, longest_s: float, given_s: list[int]
) -> None:
    found = []

    def no_answer(_address: Address, _hello: Hello, deadline: Deadline, *, tls: object) -> None:
        found.append(round(deadline.left_s()))
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(Channel, "open", no_answer)
    masters = Masters([A])
    for _ in given_s:
        with pytest.raises(Unavailable):
            find_owner(masters, HELLO, Deadline(600), attempt_s=10, max_attempt_s=longest_s)
    assert found == given_s


def test_master_not_asked_for_lack_of_time_is_first_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, clock = list[Address](), Clock()

    def no_answer(address: Address, _hello: Hello, deadline: Deadline, *, tls: object) -> None:
        asked.append(address)
        clock.ns = deadline.at_ns
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(Channel, "open", no_answer)
    monkeypatch.setattr(time, "monotonic_ns", clock)
    masters = Masters([A, B, C], clock_ns=clock)
    for address in (A, B, C, A):
        with pytest.raises(Unavailable, match=f"^no master can be reached: {address} does not respond$"):
            find_owner(masters, HELLO, Deadline(2), attempt_s=2)
    assert asked == [A, B, C, A]
    with pytest.raises(Unavailable, match="there was no time to ask one"):
        find_owner(masters, HELLO, Deadline(0), attempt_s=2)


def test_several_masters_are_retried_until_one_is_the_owner() -> None:
    with stub_masters(2) as (first, second):
        first.owner, first.refusal = "", Unavailable("no master owns the catalog now")
        second.refusal = first.refusal

        def elect() -> None:
            eventually(lambda: first.hellos > 2, "it has been asked again")
            first.refusal = None

        electing = threading.Thread(target=elect)
        electing.start()
        channel = await_owner(known(second, first), HELLO, Deadline(60), attempt_s=60, pause_s=0.01)
        electing.join()
        channel.close()
        assert str(channel.address) == first.address


def test_a_single_master_that_follows_the_catalog_is_waited_for() -> None:
    with stub_masters(1) as (only,):
        only.refusal = NoOwner("no master owns the catalog now")

        def elect() -> None:
            eventually(lambda: only.hellos > 2, "it has been asked again")
            only.refusal = None

        electing = threading.Thread(target=elect)
        electing.start()
        await_owner(known(only), HELLO, Deadline(60), attempt_s=60, pause_s=0.01).close()
        electing.join()


def test_single_master_fails_at_once_several_at_deadline() -> None:
    with stub_masters(2) as (first, second):
        first.refusal = second.refusal = Unavailable("it has all its connections in use")
        with pytest.raises(Unavailable, match="it has all its connections in use"):
            await_owner(known(first), HELLO, Deadline(60), attempt_s=60, pause_s=60)
        assert first.hellos == 1
        with pytest.raises(Unavailable, match=r"^no master can be reached: "):
            await_owner(known(first, second), HELLO, Deadline(0.5), attempt_s=60, pause_s=0.01)
        assert second.hellos > 1


def test_a_search_in_vain_leaves_nothing_to_the_collector() -> None:
    with stub_masters(2) as (first, second):
        first.refusal, second.refusal = Unauthorized("the token is wrong"), Unavailable("it has all its connections in use")
        [free] = free_ports(1)
        masters = Masters([parse_address(f"127.0.0.1:{free}"), *known(first, second).in_order()])

        def search() -> None:
            with contextlib.suppress(Unauthorized):  # pytest.raises would keep it
                find_owner(masters, HELLO, Deadline(60), attempt_s=60).close()

        assert_no_garbage(search)
