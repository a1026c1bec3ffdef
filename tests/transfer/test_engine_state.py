"""Any schedule of transfers, faults, cancellations and changes of links: every byte arrives once, or the caller gets an error."""

import random
import threading
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.protocol.errors import (
    Cancelled,
    Closed,
    DeadlineExceeded,
    Denied,
    Full,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unreachable,
)
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background
from kvstore.transfer.agent import AgentRequest
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths.batch import Copy, Span
from kvstore.transfer.paths.peer import Peer, PeerRegion
from kvstore.transfer.paths.transfers import Priority, Transfer
from tests.transfer.faulty import DELIVER, FAULTY, SPARE, WAIT, Answer, FaultyAgent, agents, settings, topology

CELL_BYTES = 40
"""Slices have 64 bytes: some pieces are cut, some slices have several."""
CELLS = 24
RAILS = ("rail0", "rail1")
FAILURES: list[type[KVStoreError]] = [Unreachable, ProtocolError, Full, StaleHandle, Denied, InvalidArgument, DeadlineExceeded]
ENDS_AT_ONCE = (StaleHandle, Denied, InvalidArgument, DeadlineExceeded, Cancelled)
Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Memory:
    """A region and what it must hold: `content`, but for the cells of transfers under way."""

    region: Region
    content: Bytes = field(init=False)
    busy: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.content = self.now().copy()

    def now(self) -> Bytes:
        return np.frombuffer(self.region.memory, np.uint8)

    def free(self) -> list[int]:
        return [cell for cell in range(CELLS) if cell not in self.busy]


@dataclass(eq=False)
class Move:
    """One copy of a transfer: whole cells at both ends are its own until the transfer is over."""

    source: Memory
    destination: Memory
    source_cells: range
    destination_cells: range
    length: int

    def source_span(self) -> slice:
        at = self.source_cells.start * CELL_BYTES
        return slice(at, at + self.length)

    def destination_span(self) -> slice:
        at = self.destination_cells.start * CELL_BYTES
        return slice(at, at + self.length)


@dataclass(eq=False)
class Case:
    """A transfer and what the model knows of it."""

    transfer: Transfer
    moves: list[Move]
    peers: set[str]
    done: list[Transfer]
    is_known: bool = False
    """The model has taken note of its end."""


class EngineMachine(RuleBasedStateMachine):
    """One engine with two rails of each of two transports, two peers, and agents controlled by the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        config = settings(f"{FAULTY},{SPARE}")
        self.engine = TransferEngine("me", config, topology=topology(*RAILS), clock_ns=lambda: self.now_ns)
        self.others = {name: TransferEngine(name, config, topology=topology(*RAILS)) for name in ("left", "right")}
        self.all_agents: list[FaultyAgent] = agents(self.engine)
        self.local = self._memory(self.engine, seed=1)
        self.remote = {name: self._memory(engine, seed=number + 2) for number, (name, engine) in enumerate(self.others.items())}
        self.peers: dict[str, Peer] = {}
        self.regions: dict[str, PeerRegion] = {}
        self.all_peers: list[Peer] = []
        self.cases: list[Case] = []

    def _memory(self, engine: TransferEngine, seed: int) -> Memory:
        return Memory(engine.register(bytearray(np.random.default_rng(seed).bytes(CELLS * CELL_BYTES))))

    @initialize()
    def connect_all(self) -> None:
        for name in self.others:
            self.connect(name)

    # --- callers ---

    @rule(
        data=st.data(),
        names=st.lists(st.sampled_from(["left", "right"]), min_size=1, max_size=5),
        priority=st.sampled_from(Priority),
        is_late=st.sampled_from([False] * 7 + [True]),
    )
    def submit(self, data: st.DataObject, names: list[str], priority: Priority, is_late: bool) -> None:
        moves: list[Move] = []
        batch: list[Copy] = []
        for name in names:
            move = data.draw(st.builds(self._move, st.just(name), st.booleans(), st.integers(0, 3 * CELL_BYTES), st.randoms()))
            if name in self.regions and move is not None:
                moves.append(move)
                ends = [self.local.region if memory is self.local else self.regions[name] for memory in (move.source, move.destination)]
                batch.append((Span(ends[0], move.source_span().start), Span(ends[1], move.destination_span().start), move.length))
                move.source.busy.update(move.source_cells)
                move.destination.busy.update(move.destination_cells)
        done: list[Transfer] = []
        deadline_s = -1.0 if is_late else PATIENCE_S
        try:
            transfer = self.engine.submit(batch, deadline_s=deadline_s, priority=priority, on_done=done.append)
        except Unreachable:
            assert any(self.peers.get(name) is None or not self.regions[name].peer.is_connected for name in names)
            for move in moves:
                move.source.busy.difference_update(move.source_cells)
                move.destination.busy.difference_update(move.destination_cells)
            return
        assert transfer.size_bytes == sum(move.length for move in moves)
        self.cases.append(Case(transfer, moves, {name for name in names if name in self.regions}, done))

    def _move(self, name: str, is_read: bool, length: int, random: random.Random) -> Move | None:
        """A copy between unused runs of cells; None when there are none."""
        source, destination = (self.remote[name], self.local) if is_read else (self.local, self.remote[name])
        cells = max(1, -(-length // CELL_BYTES))
        runs = [
            [range(first, first + cells) for first in range(CELLS - cells + 1) if not memory.busy.intersection(range(first, first + cells))]
            for memory in (source, destination)
        ]
        if not all(runs):
            return None
        return Move(source, destination, random.choice(runs[0]), random.choice(runs[1]), length)

    @precondition(lambda self: self.cases)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.cases)).transfer.cancel()

    @precondition(lambda self: self.cases)
    @rule(data=st.data())
    def let_expire(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.cases)).transfer.expire()

    # --- the network ---

    def _under_way(self) -> list[tuple[FaultyAgent, AgentRequest]]:
        return [(agent, request) for agent in self.all_agents for request in agent.under_way]

    @precondition(lambda self: self._under_way())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        agent, request = data.draw(st.sampled_from(self._under_way()))
        agent.end(request)

    @precondition(lambda self: self._under_way())
    @rule(data=st.data(), kind=st.sampled_from(FAILURES), moved_bytes=st.sampled_from([0, 1, 33, None]))
    def fail(self, data: st.DataObject, kind: type[KVStoreError], moved_bytes: int | None) -> None:
        agent, request = data.draw(st.sampled_from(self._under_way()))
        agent.end(request, Answer(kind("as told"), moved_bytes))

    @rule(
        data=st.data(),
        default=st.sampled_from([DELIVER, WAIT, WAIT, Answer(Unreachable("down"), 0), Answer(ProtocolError("mad"), 20)]),
        ignores_cancel=st.booleans(),
    )
    def behave(self, data: st.DataObject, default: Answer, ignores_cancel: bool) -> None:
        """An agent's way from now on."""
        agent = data.draw(st.sampled_from(agents(self.engine)))
        agent.default, agent.ignores_cancel = default, ignores_cancel

    @rule(step_ms=st.integers(1, 10_000))
    def pass_time(self, step_ms: int) -> None:
        self.now_ns += step_ms * 1_000_000

    # --- peers and links ---

    @rule(name=st.sampled_from(["left", "right"]))
    def connect(self, name: str) -> None:
        """For the first time, again, or with what has changed."""
        other = self.others[name]
        peer = self.peers[name] = self.engine.connect(other.describe())
        if peer not in self.all_peers:
            self.all_peers.append(peer)
        self.regions[name] = self.engine.import_region(peer, other.export(self.remote[name].region, writable=True))

    @rule(name=st.sampled_from(["left", "right"]))
    def disconnect(self, name: str) -> None:
        if name in self.peers:
            self.engine.disconnect(self.peers.pop(name))

    @rule(rails=st.sampled_from([("rail0",), ("rail1",), RAILS, ("rail0", "rail1", "rail2")]))
    def change_links(self, rails: tuple[str, ...]) -> None:
        self.engine.refresh(topology(*rails))
        self.all_agents += [agent for agent in agents(self.engine) if agent not in self.all_agents]

    @rule(name=st.sampled_from(["left", "right"]), rails=st.sampled_from([("rail0",), ("rail1",), RAILS]))
    def change_links_of_peer(self, name: str, rails: tuple[str, ...]) -> None:
        self.others[name].refresh(topology(*rails))

    # --- promises ---

    @invariant()
    def what_is_over_is_told_once_and_lets_go(self) -> None:
        for case in self.cases:
            assert len(case.done) == case.transfer.is_over
            assert not (case.transfer.is_over and case.transfer.in_flight)
            if case.transfer.is_over and not case.is_known:
                self._note_end(case)
        self.cases = [case for case in self.cases if not case.is_known]
        assert self.local.region.users == sum(bool(case.moves) for case in self.cases)

    def _note_end(self, case: Case) -> None:
        """From now on its cells must stay as they are. Those of one without an error are those of its sources."""
        case.is_known = True
        error = case.transfer.error
        assert error is None or type(error) in {*FAILURES, Cancelled, Closed}
        for move in case.moves:
            span = move.destination_span()
            now, old, new = move.destination.now()[span], move.destination.content[span], move.source.content[move.source_span()]
            if error is None:
                assert (now == new).all(), "bytes are missing, and nobody was told"
            assert ((now == old) | (now == new)).all(), "bytes that nobody sent"
            move.destination.content[span] = now
            move.source.busy.difference_update(move.source_cells)
            move.destination.busy.difference_update(move.destination_cells)

    @invariant()
    def no_other_byte_is_touched(self) -> None:
        for memory in [self.local, *self.remote.values()]:
            expected, now = memory.content.copy(), memory.now()
            for move in [move for case in self.cases for move in case.moves if move.destination is memory]:
                span = move.destination_span()
                new = move.source.content[move.source_span()]
                assert ((now[span] == expected[span]) | (now[span] == new)).all()
                expected[span] = now[span]
            assert (now == expected).all(), "memory of no transfer was written"

    @invariant()
    def accounts_add_up(self) -> None:
        """The choosers' slices in flight equal the agents', and stay within each path's window."""
        under_way = self._under_way()
        for peer in self.all_peers:
            peer.chooser.check_integrity()
        in_flight = [state for peer in self.all_peers for state in peer.chooser.states.values()]
        assert sum(state.in_flight_slices for state in in_flight) == len(under_way)
        assert sum(state.in_flight_bytes for state in in_flight) == sum(request.size_bytes for _, request in under_way)
        assert all(state.in_flight_slices <= FaultyAgent.window for state in in_flight)
        assert all(agent.peak <= agent.window for agent in self.all_agents)

    @invariant()
    def nothing_waits_for_nothing(self) -> None:
        """A transfer that is not over has something under way, or waits at a peer that has."""
        busy = {request.context.peer for _, request in self._under_way()}
        for case in self.cases:
            is_moving = case.transfer.is_over or bool(case.transfer.in_flight)
            assert is_moving or any(peer in busy and peer.name in case.peers for peer in self.all_peers)

    @invariant()
    def peers_are_loaded_as_long_as_there_is_a_route_to_them(self) -> None:
        routes = [route for peer in self.engine.peers() for route in peer.routes.values()]
        loaded = [remote for agent in agents(self.engine) for remote in agent.loaded]
        assert {id(route.remote) for route in routes} == {id(remote) for remote in loaded}

    @invariant()
    def what_has_failed_is_cancelled_wherever_that_is_possible(self) -> None:
        for agent, request in self._under_way():
            assert request.context.transfer.error is None or agent.has_ignored_a_cancel

    def teardown(self) -> None:
        """Everything is delivered, or the engine is closed on it."""
        try:
            if len(self.cases) % 2:
                self.engine.close()
            while under_way := self._under_way():
                under_way[0][0].end(under_way[0][1])
            assert all(case.transfer.is_over for case in self.cases)
            self.what_is_over_is_told_once_and_lets_go()
            self.no_other_byte_is_touched()
            self.accounts_add_up()
            assert not any(memory.region.users or memory.busy for memory in [self.local, *self.remote.values()])
        finally:
            self.engine.close()
            for other in self.others.values():
                other.close()


EngineMachine.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)
TestEngineMachine = EngineMachine.TestCase


class Network:
    """A thread that ends what is under way, most of it well, in any order. A context manager: ends with what is left delivered."""

    def __init__(self, engine: TransferEngine, seed: int) -> None:
        self._agents = agents(engine)
        self._random = random.Random(seed)
        self._is_leaving = False
        self._has_work = threading.Semaphore(0)
        for agent in self._agents:
            agent.default = WAIT
            agent.before_submit = lambda request: self._has_work.release()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_leaving:
            self._has_work.acquire()
            requests = [(agent, request) for agent in self._agents for request in list(agent.under_way)]
            self._random.shuffle(requests)
            for agent, request in requests:
                is_good = self._random.random() < 0.7
                agent.end(request, DELIVER if is_good else Answer(Unreachable("as told"), self._random.choice([0, 20, None])))

    def __enter__(self) -> "Network":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_leaving = True
        self._has_work.release()
        self._thread.join()
        for agent in self._agents:
            agent.default = DELIVER
        while any(agent.under_way for agent in self._agents):
            for agent in self._agents:
                agent.end_all()


@dataclass
class Caller:
    """A thread that reads into its own buffer, cancels some reads, and compares the results, until the engine is closed."""

    engine: TransferEngine
    source: Span
    expected: bytes
    chance: random.Random
    has_enough: threading.Event = field(default_factory=threading.Event)
    done: list[Transfer] = field(default_factory=list)
    arrived: int = 0

    def run(self) -> None:
        while True:
            buffer = bytearray(len(self.expected))
            try:
                transfer = self.engine.submit([(self.source, buffer, len(buffer))], on_done=self.done.append)
                if self.chance.random() < 0.3:
                    transfer.cancel()
                transfer.wait()
            except (Cancelled, Unreachable):
                assert transfer.is_over
            except Closed:
                return
            else:
                assert buffer == self.expected
                self.arrived += 1
                if self.arrived == 50:
                    self.has_enough.set()


@pytest.mark.parametrize("seed", range(4))
def test_submits_cancels_and_close_may_race(seed: int) -> None:
    """Four threads submit, cancel and wait while their requests end in a fifth and, at last, the engine is closed under them."""
    config, rails, size = settings(f"{FAULTY},{SPARE}"), topology(*RAILS), 512
    with TransferEngine("me", config, topology=rails) as engine, TransferEngine("left", config, topology=rails) as other:
        theirs = other.allocate(4 * size)
        theirs.memory[:] = np.random.default_rng(seed).bytes(4 * size)
        remote = engine.import_region(engine.connect(other.describe()), other.export(theirs))
        callers = [
            Caller(engine, Span(remote, at), bytes(theirs.memory[at : at + size]), random.Random(seed + at))
            for at in range(0, 4 * size, size)
        ]
        with Network(engine, seed):
            running = [in_background(caller.run) for caller in callers]
            for caller in callers:
                assert caller.has_enough.wait(PATIENCE_S)
            engine.close()
            for thread in running:
                thread.result(PATIENCE_S)
        done = [transfer for caller in callers for transfer in caller.done]
        assert len(done) == len(set(done)), "told twice"
        assert all(transfer.is_over and not transfer.in_flight for transfer in done)
