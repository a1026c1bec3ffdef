"""Promises of the engine to its callers: over agents with scripted failures (tests/transfer/faulty.py), then over real ones."""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from kvstore.protocol.errors import (
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    Unreachable,
)
from kvstore.testing.transfer.awaited import PATIENCE_S, SHORT_S, within
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths.batch import Runs, Span
from kvstore.transfer.paths.peer import PeerRegion
from kvstore.transfer.streams.tcp import TcpListener
from kvstore.transfer.topology.model import RailPreference
from tests.forks import told_by_child
from tests.ports import free_ports
from tests.transfer.faulty import FAULTY, SPARE, WAIT, Answer, FaultyAgent, PickyAgent, agents, settings, topology

DOWN = Answer(Unreachable("down"), moved_bytes=10)


class Scene:
    """Engines of one process over faulty agents. A context manager that closes them."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def engine(
        self, name: str, transports: str = FAULTY, *, rails: str = "rail0", clock_ns: Callable[[], int] = lambda: 0, serves: bool = True
    ) -> TransferEngine:
        engine = TransferEngine(name, settings(transports), topology=topology(*rails.split()), clock_ns=clock_ns, serves=serves)
        return self._stack.enter_context(engine)

    def pair(self, transports: str = FAULTY, *, rails: str = "rail0") -> tuple[TransferEngine, Region, PeerRegion]:
        """(an engine, a region of another one that holds 0, 1, 2 ..., that region as the first knows it). The other has one rail."""
        engine, other = self.engine("me", transports, rails=rails), self.engine("other", transports, rails=rails.partition(" ")[0])
        region = other.register(bytearray(bytes(range(256))))
        return engine, region, engine.import_region(engine.connect(other.describe()), other.export(region, writable=True))

    def __enter__(self) -> "Scene":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene() as scene:
        yield scene


def only_agent(engine: TransferEngine) -> FaultyAgent:
    [agent] = agents(engine)
    return agent


# --- moving ---


def test_a_batch_mixes_directions_peers_and_plain_buffers(scene: Scene) -> None:
    engine, first_region, first = scene.pair()
    other = scene.engine("third")
    second_region = other.register(bytearray(100))
    second = engine.import_region(engine.connect(other.describe()), other.export(second_region, writable=True))
    read, array = bytearray(150), np.zeros(10, np.int32)
    engine.transfer([(Span(first, 100), read, 150), (b"w" * 60, Span(first, 3), 60), (b"v" * 100, second, 100), (first, array, 3)])
    assert read == bytes(range(100, 250))
    assert bytes(first_region.memory[:64]) == bytes([0, 1, 2]) + b"w" * 60 + bytes([63])
    assert second_region.memory == b"v" * 100
    assert array.tobytes()[3:] == bytes(37)


def test_buffers_are_free_again_when_their_transfer_is_over(scene: Scene) -> None:
    """A bytearray that is still exported could not be resized."""
    engine, _, remote = scene.pair()
    only_agent(engine).default = WAIT
    region, buffer = engine.allocate(64), bytearray(64)
    transfer = engine.submit([(remote, region, 64), (remote, Span(buffer), 64)])
    assert region.users == 1
    only_agent(engine).begun.clear()
    only_agent(engine).end_all()
    only_agent(engine).end_all()
    assert transfer.is_over
    assert region.users == 0
    region.close()


def test_a_thousand_slices_that_end_at_once_do_not_nest(scene: Scene) -> None:
    """Each that ends begins the next; done within one another they would run out of stack."""
    engine, other = scene.engine("me"), scene.engine("other")
    region = other.allocate(64 * 2000)
    region.memory[:] = np.random.default_rng(0).bytes(64 * 2000)
    copy = bytearray(64 * 2000)
    engine.transfer([(engine.import_region(engine.connect(other.describe()), other.export(region)), copy, len(copy))])
    assert copy == region.memory


def test_runs_arrive_over_every_transport_and_both_ways() -> None:
    for transport in ("shm", "tcp"):
        used = TransferSettings(transports=transport, rails="lo", slice_bytes=4096, shm_slice_bytes=4096)
        with TransferEngine("me", used) as engine, TransferEngine("other", used) as other:
            theirs, ours = other.allocate(400 * 100), [engine.allocate(200 * 100), engine.allocate(200 * 100)]
            theirs.memory[:] = np.random.default_rng(0).bytes(400 * 100)
            remote = engine.import_region(engine.connect(other.describe()), other.export(theirs, writable=True))
            order, index = np.random.default_rng(1).permutation(400) * 100, np.arange(400)
            none, length = np.zeros(400, np.int64), np.broadcast_to(100, 400)
            engine.transfer(Runs([remote], ours, none, order, index % 2, index // 2 * 100, length))
            found = np.stack([np.frombuffer(region.memory, np.uint8).reshape(-1, 100) for region in ours], axis=1).reshape(-1, 100)
            assert np.array_equal(found, np.frombuffer(theirs.memory, np.uint8).reshape(-1, 100)[order // 100])
            engine.transfer(Runs(ours, [remote], index % 2, index // 2 * 100, none, index * 100, length))
            assert np.array_equal(found, np.frombuffer(theirs.memory, np.uint8).reshape(-1, 100))


def test_runs_cost_no_python_call_each() -> None:
    """They stay columns; what is called is called a slice."""
    used = TransferSettings(transports="tcp", rails="lo", tcp_streams=1)
    with TransferEngine("me", used) as engine, TransferEngine("other", used) as other:
        count, calls = 100_000, Counter[str]()
        theirs, ours, none = other.allocate(64 * count), engine.allocate(32 * count), np.zeros(count, np.int64)
        theirs.memory[:] = np.random.default_rng(0).bytes(64 * count)
        remote = engine.import_region(engine.connect(other.describe()), other.export(theirs))
        runs = Runs([remote], [ours], none, np.arange(count) * 64, none, np.arange(count) * 32, none + 32)
        sys.setprofile(lambda frame, event, _: calls.update([event]))
        try:
            engine.transfer(runs)
        finally:
            sys.setprofile(None)
        assert calls["call"] + calls["c_call"] < count / 10
        assert np.array_equal(
            np.frombuffer(ours.memory, np.uint8), np.frombuffer(theirs.memory, np.uint8).reshape(-1, 64)[:, :32].reshape(-1)
        )


@pytest.mark.parametrize("as_runs", [False, True])
def test_each_rail_uses_its_own_descriptor_of_a_region(scene: Scene, as_runs: bool) -> None:
    keyed = "tests.transfer.faulty:KeyedAgent"
    engine, other = scene.engine("me", keyed), scene.engine("other", keyed, rails="rail0 rail1 rail9")
    theirs, ours = other.allocate(640), engine.allocate(640)
    theirs.memory[:] = np.random.default_rng(0).bytes(640)
    remote = engine.import_region(engine.connect(other.describe()), other.export(theirs))
    assert remote.remote.descriptors == {"keyed@rail0": b"rail0", "keyed@rail1": b"rail1"}
    engine.transfer(Runs([remote], [ours], [0], [0], [0], [0], [640]) if as_runs else [(remote, ours, 640)])
    assert ours.memory == theirs.memory
    delivered = {path.remote_rail: state.delivered_slices for path, state in remote.peer.chooser.states.items()}
    assert [bool(delivered[rail]) for rail in ("rail0", "rail1", "rail9")] == [True, True, False]


# --- waiting ---


def test_a_wait_that_is_interrupted_ends_the_transfer(scene: Scene) -> None:
    engine, _, remote = scene.pair()
    agent = only_agent(engine)
    agent.default = WAIT

    def interrupt(request: object) -> None:
        raise KeyboardInterrupt

    agent.run = interrupt  # type: ignore[method-assign]
    region = engine.allocate(64)
    with pytest.raises(KeyboardInterrupt):
        engine.transfer([(remote, region, 64)])
    assert region.users == 0


# --- asyncio ---


def test_a_task_transfers_and_is_told_of_errors(scene: Scene) -> None:
    engine, _, remote = scene.pair()
    buffer = bytearray(256)

    async def use() -> None:
        await engine.transfer_async([(remote, buffer, 256)])
        only_agent(engine).default = DOWN
        with pytest.raises(Unreachable, match="down"):
            await engine.transfer_async([(remote, buffer, 256)])

    asyncio.run(use())
    assert buffer == bytes(range(256))


def test_a_cancelled_task_goes_on_once_no_byte_moves_any_more(scene: Scene) -> None:
    engine, region, remote = scene.pair()
    agent = only_agent(engine)
    agent.default, agent.ignores_cancel = WAIT, True

    async def use() -> None:
        task = asyncio.create_task(engine.transfer_async([(b"w" * 256, remote, 256)]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done(), "two slices are still under way"
        agent.end_all()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not agent.under_way

    asyncio.run(use())
    assert len(agent.begun) == 2
    assert bytes(region.memory) == b"w" * 128 + bytes(range(128, 256))


def test_a_tasks_deadline_ends_its_transfer(scene: Scene) -> None:
    engine, _, remote = scene.pair()
    only_agent(engine).default = WAIT
    blocking = [engine.submit([(remote, bytearray(64), 64)]) for _ in range(FaultyAgent.window)]
    with within(SHORT_S), pytest.raises(DeadlineExceeded):
        asyncio.run(engine.transfer_async([(remote, bytearray(64), 64)], deadline_s=SHORT_S))
    assert not any(transfer.is_over for transfer in blocking)


def test_a_closed_loop_does_not_affect_transfers(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    engine, _, remote = scene.pair()
    only_agent(engine).default = WAIT
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.transfer_async([(remote, bytearray(64), 64)]))
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    only_agent(engine).end_all()
    assert "on_done of a transfer failed" in caplog.text
    task.get_coro().close()


# --- faults ---


def test_a_failed_slice_falls_back_to_rail_and_transport(scene: Scene) -> None:
    engine, region, remote = scene.pair(f"{FAULTY},{SPARE}", rails="rail0 rail1")
    for agent in agents(engine)[:3]:
        agent.default = DOWN
    transfer = engine.submit([(b"w" * 64, remote, 64)])
    transfer.wait()
    assert transfer.retries == 3
    assert [len(agent.begun) for agent in agents(engine)] == [1, 1, 1, 1]
    assert bytes(region.memory[:64]) == b"w" * 64
    states = remote.peer.chooser.states
    assert sum(state.retried_slices for state in states.values()) == 3
    assert sum(state.failed_slices for state in states.values()) == 3


def test_an_unreachable_peer_fails_at_once_and_recovers(scene: Scene) -> None:
    engine, _, remote = scene.pair(f"{FAULTY},{SPARE}", rails="rail0 rail1")
    for agent in agents(engine):
        agent.default = DOWN
    for _ in range(3):
        with within(0), pytest.raises(Unreachable, match="down"):
            engine.transfer([(remote, bytearray(256), 256)], deadline_s=PATIENCE_S)
    for agent in agents(engine):
        agent.default = Answer()
    buffer = bytearray(256)
    engine.transfer([(remote, buffer, 256)])
    assert buffer == bytes(range(256))


# --- peers ---


def test_connect_without_common_transport_names_both_lists(scene: Scene) -> None:
    engine, other = scene.engine("me", FAULTY), scene.engine("other", SPARE)
    with pytest.raises(Unreachable, match="other: this side has faulty, that side spare"):
        engine.connect(other.describe())
    silent = scene.engine("silent", serves=False)
    with pytest.raises(Unreachable, match="that side nothing"):
        engine.connect(silent.describe())
    with pytest.raises(InvalidArgument, match="serves=True"):
        silent.export(silent.allocate(4))
    assert engine.peers() == []


def test_connecting_again_is_the_same_peer_with_its_new_rails(scene: Scene) -> None:
    engine, other = scene.engine("me"), scene.engine("other")
    peer = engine.connect(other.describe())
    assert engine.connect(other.describe()) is peer
    assert other.refresh(topology("rail0", "rail1"))
    assert len(peer.routes) == 1
    assert engine.connect(other.describe()) is peer
    assert len(peer.routes) == 2
    assert [remote.device for remote in only_agent(engine).loaded] == ["rail0", "rail1"], "what stays is not loaded again"
    assert other.refresh(topology("rail1"))
    engine.connect(other.describe())
    assert [remote.device for remote in only_agent(engine).loaded] == ["rail1"], "what is gone is unloaded"
    assert engine.peers() == [peer]


def test_a_restarted_peer_accepts_new_connections() -> None:
    used = TransferSettings(transports="tcp", rails="lo")
    fixed = replace(used, listen_port=free_ports(1)[0])
    with TransferEngine("me", used) as engine:
        for value in (b"before", b"after"):
            with TransferEngine("other", fixed) as other:
                memory = bytearray(len(value))
                remote = engine.import_region(engine.connect(other.describe()), other.export(other.register(bytearray(value))))
                engine.transfer([(remote, memory, len(value))])
                assert bytes(memory) == value


def test_a_disconnected_peer_ends_its_transfers_and_is_refused(scene: Scene) -> None:
    engine, _, remote = scene.pair()
    only_agent(engine).default = WAIT
    queued = engine.submit([(remote, bytearray(256), 256)])
    under_way = engine.submit([], on_done=None)
    assert under_way.is_over
    engine.disconnect(remote.peer)
    engine.disconnect(remote.peer)
    with pytest.raises(Unreachable, match="other was disconnected"):
        queued.wait()
    with pytest.raises(Unreachable, match="disconnected"):
        engine.submit([(remote, bytearray(4), 4)])
    with pytest.raises(Unreachable, match="disconnected"):
        engine.notify(remote.peer, b"hello")
    assert not only_agent(engine).loaded
    assert engine.peers() == []


def test_idle_peers_are_forgotten_after_peer_ttl(scene: Scene) -> None:
    now_s = [0.0]
    engine = scene.engine("me", clock_ns=lambda: int(now_s[0] * 1e9))
    ttl_s = engine.settings.peer_ttl_s
    others = [scene.engine(f"other{number}") for number in range(3)]
    used, named, idle = [engine.connect(other.describe()) for other in others]
    regions = [other.register(bytearray(100)) for other in others]
    theirs = [
        engine.import_region(peer, other.export(region)) for peer, other, region in zip((used, named, idle), others, regions, strict=True)
    ]

    def read(index: int) -> None:
        engine.transfer([(Span(theirs[index], 0), bytearray(100), 100)])

    now_s[0] = ttl_s / 2
    read(0)
    assert engine.connect(others[1].describe()) is named
    now_s[0] = ttl_s - 0.001
    engine.forget_idle()
    assert set(engine.peers()) == {used, named, idle}
    now_s[0] = ttl_s
    engine.forget_idle()
    assert set(engine.peers()) == {used, named}
    with pytest.raises(Unreachable, match="was disconnected"):
        read(2)
    again = engine.connect(others[2].describe())
    assert again is not idle
    theirs[2] = PeerRegion(again, theirs[2].remote)
    read(2)


def test_a_peer_with_work_under_way_is_not_forgotten(scene: Scene) -> None:
    now_s = [0.0]
    engine = scene.engine("me", clock_ns=lambda: int(now_s[0] * 1e9))
    other = scene.engine("other")
    peer = engine.connect(other.describe())
    theirs = engine.import_region(peer, other.export(other.register(bytearray(100))))
    only_agent(engine).default = WAIT
    transfer = engine.submit([(Span(theirs, 0), bytearray(100), 100)])
    now_s[0] = 2 * engine.settings.peer_ttl_s
    engine.forget_idle()
    assert engine.peers() == [peer]
    only_agent(engine).end_all()
    transfer.wait()
    engine.forget_idle()
    assert engine.peers() == []


def test_slices_to_a_disconnected_peer_are_not_retried(scene: Scene) -> None:
    engine, _, remote = scene.pair(rails="rail0 rail1")
    for agent in agents(engine):
        agent.default = WAIT
    transfer = engine.submit([(remote, bytearray(64), 64)])
    engine.disconnect(remote.peer)
    assert isinstance(transfer.error, Unreachable)
    assert transfer.is_over
    assert sum(len(agent.begun) for agent in agents(engine)) == 1


# --- links ---


def test_slices_on_a_removed_rail_move_to_another(scene: Scene) -> None:
    engine, _, remote = scene.pair(rails="rail0 rail1")
    for agent in agents(engine):
        agent.default = WAIT
    buffer = bytearray(256)
    transfer = engine.submit([(remote, buffer, 256)])
    old, stays = agents(engine)
    assert old.under_way
    assert stays.under_way
    stays.default = Answer()
    assert engine.refresh(topology("rail1"))
    assert old.is_closed
    stays.end_all()
    transfer.wait()
    assert buffer == bytes(range(256))
    assert agents(engine) == [stays]
    assert engine.refresh(topology("rail0", "rail1"))
    assert agents(engine)[1] is stays
    assert {path.local_rail for path in remote.peer.routes} == {"rail0", "rail1"}


def test_memory_that_comes_near_other_rails_is_described_anew(scene: Scene) -> None:
    engine, _, remote = scene.pair(rails="rail0 rail1")
    links = topology("rail0", "rail1")
    assert engine.refresh(replace(links, override={"cpu:0": RailPreference(("rail1",), ("rail0",))}))
    assert b'"cpu:0":[["rail1"],["rail0"]]' in engine.describe()
    engine.transfer([(remote, bytearray(4), 4)])
    assert [len(agent.begun) for agent in agents(engine)] == [0, 1]


def test_a_peer_keeps_its_routes_if_a_new_agent_fails(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    transports = "tests.transfer.faulty:PickyAgent"
    PickyAgent.is_picky = False
    engine, _, remote = scene.pair(transports, rails="rail0")
    PickyAgent.is_picky = True
    try:
        assert engine.refresh(topology("rail0", "rail1"))
        assert "a new route to other cannot be used" in caplog.text
        assert len(remote.peer.routes) == 1
        engine.transfer([(remote, bytearray(4), 4)])
        with pytest.raises(ProtocolError):
            scene.engine("third", transports).connect(scene.engine("fourth", transports).describe())
    finally:
        PickyAgent.is_picky = False


# --- notifications ---


def test_notifications_use_any_working_path(scene: Scene) -> None:
    engine, _, remote = scene.pair(rails="rail0 rail1")
    first, second = agents(engine)
    first.default = DOWN
    engine.notify(remote.peer, b"one")
    first.default, second.default = Answer(Closed("its rail has gone")), Answer()
    engine.notify(remote.peer, b"two")
    second.default = DOWN
    with pytest.raises(KVStoreError):
        engine.notify(remote.peer, b"three")


def test_an_interrupted_submit_raises_without_a_thread(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    engine, _, remote = scene.pair()
    before = signal.signal(signal.SIGUSR1, strike)
    try:
        only_agent(engine).before_submit = lambda request: signal.raise_signal(signal.SIGUSR1)
        monkeypatch.setattr("_thread.start_new_thread", no_thread)
        with pytest.raises(KeyboardInterrupt):
            engine.submit([(remote, bytearray(8), 8)])
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- the beginning and the end ---


def test_a_closed_engine_ends_its_transfers_and_takes_no_more(scene: Scene) -> None:
    engine, _, remote = scene.pair()
    only_agent(engine).default = WAIT
    transfer = engine.submit([(remote, bytearray(256), 256)])
    engine.close()
    engine.close()
    with pytest.raises(Closed):
        transfer.wait()
    with pytest.raises(Closed):
        engine.submit([])
    with pytest.raises(Closed):
        engine.connect(scene.engine("third").describe())
    with pytest.raises((Closed, Unreachable)):
        engine.notify(remote.peer, b"")


@pytest.mark.promise("interrupts-safe")
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_forked_child_raises_forked_and_harms_no_peer(transports: str) -> None:
    config = TransferSettings(transports=transports, rails="lo")
    with TransferEngine("parent", config) as parent, TransferEngine("user", config) as user:
        region, mine = parent.allocate(64), user.allocate(64)
        remote = user.import_region(user.connect(parent.describe()), parent.export(region))
        theirs = parent.import_region(parent.connect(user.describe()), user.export(mine))
        for engine, source in ((user, remote), (parent, theirs)):
            engine.transfer([(source, bytearray(64), 64)])
        for call in (
            lambda: parent.transfer([(theirs, bytearray(64), 64)]),
            lambda: parent.connect(user.describe()),
            lambda: parent.export(region),
            lambda: parent.disconnect(theirs.peer),
            lambda: parent.forget_idle(),
            lambda: parent.refresh(parent.topology),
        ):
            assert told_by_child(call) == "Forked"
        assert told_by_child(parent.close) == "None"
        assert told_by_child(region.close) == "None"
        for engine, source in ((user, remote), (parent, theirs)):
            engine.transfer([(source, bytearray(64), 64)])
        with TransferEngine("other", config) as other:
            other.transfer([(other.import_region(other.connect(parent.describe()), parent.export(region)), bytearray(64), 64)])


def test_an_agent_that_cannot_be_closed_leaves_nobody_served(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, *_ = scene.pair()
    monkeypatch.setattr(only_agent(engine), "close", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine.close()
    with pytest.raises(Closed):
        engine._target.attach(TcpListener("127.0.0.1", 0))


def test_what_was_measured_of_a_peer_is_told_by_its_name() -> None:
    with (
        TransferEngine("a", settings("tcp"), topology=topology("rail0")) as a,
        TransferEngine("b", settings("tcp"), topology=topology("rail0")) as b,
    ):
        region = b.allocate(1 << 20)
        remote = a.import_region(a.connect(b.describe()), b.export(region))
        assert a.measured("b") is None, "nothing has moved"
        a.transfer([(Span(remote, 0), bytearray(1 << 20), 1 << 20)])
        measured = a.measured("b")
        assert measured is not None
        assert measured.bytes_s > 0
        assert a.measured("nobody") is b.measured("a") is None
