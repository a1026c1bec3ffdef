"""Engines on two hosts (tests/namespaces.py), one of which loads all rails without pause and compares every byte.

The parent's side is `Load`; the engines are processes: `python -m tests.transfer.paths.rails_child target SETTINGS` and
`... initiator SETTINGS read|write`. They communicate with each other and the parent in lines of JSON.
"""

import base64
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self

import numpy as np
import xxhash

from kvstore.protocol.errors import KVStoreError
from kvstore.transfer import Span, TransferEngine
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.paths.peer import Peer, PeerRegion
from tests.forked import Forked
from tests.namespaces import TwoHosts

BLOCK_BYTES: Final = 4 << 20
BLOCKS: Final = 8
BATCH_BYTES: Final = BLOCKS * BLOCK_BYTES
CALLERS: Final = 4
"""Threads with a batch under way each: one that compares what has arrived leaves the rails to the others."""
CONTENTS: Final = 3
"""Different contents that batches have in turn: what an earlier batch left behind is not taken for what should have arrived."""
ANSWER_DEADLINE_S: Final = 120.0
Direction = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Look:
    """Progress of the load."""

    now_ns: int
    """Monotonic time of the engine's process, which is that of the whole machine."""
    delivered_bytes: Mapping[str, int]
    """By rail."""
    batches: int
    slowest_batch_s: float
    """Of those that ended since the last look."""
    wrong_blocks: int
    errors: list[str] = field(default_factory=list)
    """Errors that callers saw."""

    @property
    def total_bytes(self) -> int:
        return sum(self.delivered_bytes.values())


class Load:
    """The parent's side: reads or writes without pause from construction to the end of the context. One thread."""

    def __init__(self, hosts: TwoHosts, direction: Direction = "read", **settings: Any) -> None:
        """`settings` of both engines; TCP if they name no transports. Raises RuntimeError when an engine does not start."""
        wait_until_up(hosts)
        packed = json.dumps({"transports": "tcp", **settings})
        self._target = _start(hosts, 1, "target", packed)
        described = answer_of(self._target)
        self._initiator = _start(hosts, 0, "initiator", packed, direction)
        self._ask(described)

    def look(self) -> Look:
        """Raises RuntimeError when the initiator has died."""
        return Look(**self._ask({}))

    def close(self) -> Look:
        """End the load: what it has done, once everything under way is over."""
        return Look(**self._ask({"ends": True}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._initiator, self._target):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def _ask(self, question: Any) -> Any:
        assert self._initiator.stdin is not None
        print(json.dumps(question), file=self._initiator.stdin, flush=True)
        return answer_of(self._initiator)


def wait_until_up(hosts: TwoHosts) -> None:
    """The kernel reports a new link as up after up to a second, and engines use no other."""
    until_s = time.monotonic() + ANSWER_DEADLINE_S
    for host in (0, 1):
        for rail in hosts.rails:
            while "state UP" not in hosts.run(host, ["ip", "link", "show", "dev", rail.device]):
                if time.monotonic() > until_s:
                    raise RuntimeError(f"{rail.device} does not come up")
                threading.Event().wait(0.02)


def _start(hosts: TwoHosts, host: int, *arguments: str) -> Forked:
    module, place = "tests.transfer.paths.rails_child", hosts.names[host]
    return Forked(module, arguments, environment=os.environ, stderr=sys.__stderr__, host=place, has_input=True)


def answer_of(process: "Forked | subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    overdue = threading.Timer(ANSWER_DEADLINE_S, process.kill)
    overdue.start()
    try:
        line = process.stdout.readline()
    finally:
        overdue.cancel()
    if not line:
        raise RuntimeError(f"an engine's process has ended or did not answer within {ANSWER_DEADLINE_S:g} s")
    return json.loads(line)


# --- the engines' processes ---


def content(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of the batch with that number."""
    return np.random.default_rng(number % CONTENTS).integers(0, 256, BATCH_BYTES, np.uint8)


def target(settings: TransferSettings) -> None:
    """Show CONTENTS batches to read and room for one batch a caller to write."""
    with TransferEngine("target", settings) as engine:
        source, sink = engine.allocate(CONTENTS * BATCH_BYTES), engine.allocate(CALLERS * BATCH_BYTES)
        for number in range(CONTENTS):
            source.memory[number * BATCH_BYTES : (number + 1) * BATCH_BYTES] = content(number).data
        exports = [engine.export(source), engine.export(sink, writable=True)]
        print(json.dumps([base64.b64encode(part).decode() for part in [engine.describe(), *exports]]), flush=True)
        sys.stdin.read()


class _Initiator:
    """Callers in threads, and what they have done."""

    def __init__(self, engine: TransferEngine, peer: Peer, source: PeerRegion, sink: PeerRegion, direction: Direction) -> None:
        self._engine = engine
        self._peer = peer
        self._source = source
        self._sink = sink
        self._direction = direction
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._batches = 0
        self._slowest_batch_s = 0.0
        self._wrong_blocks = 0
        self._errors: list[str] = []
        contents = [content(number) for number in range(CONTENTS)]
        self._digests = [[xxhash.xxh3_64_intdigest(block.data) for block in each.reshape(BLOCKS, BLOCK_BYTES)] for each in contents]
        self._ours = engine.allocate(CONTENTS * BATCH_BYTES)
        self._ours.memory[:] = np.concatenate(contents).data
        self._threads = [threading.Thread(target=self._load, args=(caller,)) for caller in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def _load(self, caller: int) -> None:
        arrived = self._engine.allocate(BATCH_BYTES)
        number = caller
        while not self._ends.is_set():
            begun_s = time.monotonic()
            try:
                self._move(caller, number % CONTENTS, arrived)
            except KVStoreError as error:
                with self._lock:
                    self._errors.append(repr(error))
                return
            taken_s = time.monotonic() - begun_s
            blocks = np.frombuffer(arrived.memory, np.uint8).reshape(BLOCKS, BLOCK_BYTES)
            wrong = sum(xxhash.xxh3_64_intdigest(block.data) != self._digests[number % CONTENTS][i] for i, block in enumerate(blocks))
            with self._lock:
                self._batches += 1
                self._slowest_batch_s = max(self._slowest_batch_s, taken_s)
                self._wrong_blocks += wrong
            number += 1

    def _move(self, caller: int, number: int, arrived: Any) -> None:
        """Read a batch of the target's, or write one of ours and read it back."""
        blocks = range(0, BATCH_BYTES, BLOCK_BYTES)
        begin, there = number * BATCH_BYTES, caller * BATCH_BYTES
        if self._direction == "read":
            self._engine.transfer([(Span(self._source, begin + at), Span(arrived, at), BLOCK_BYTES) for at in blocks])
            return
        self._engine.transfer([(Span(self._ours, begin + at), Span(self._sink, there + at), BLOCK_BYTES) for at in blocks])
        self._engine.transfer([(Span(self._sink, there), Span(arrived), BATCH_BYTES)])

    def look(self) -> Look:
        delivered = dict.fromkeys((agent.rail.device for agent in self._engine.agents), 0)
        with self._lock:
            for path, state in list(self._peer.chooser.states.items()):
                delivered[path.local_rail] += state.delivered_bytes
            slowest_s, self._slowest_batch_s = self._slowest_batch_s, 0.0
            return Look(time.monotonic_ns(), delivered, self._batches, slowest_s, self._wrong_blocks, list(self._errors))

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def initiator(settings: TransferSettings, direction: Direction) -> None:
    """Load the target that the first line describes, and answer every further line with a Look."""
    description, *exports = map(base64.b64decode, json.loads(sys.stdin.readline()))
    with TransferEngine("initiator", settings, serves=False) as engine:
        peer = engine.connect(description)
        source, sink = (engine.import_region(peer, export) for export in exports)
        load = _Initiator(engine, peer, source, sink, direction)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            if json.loads(line).get("ends"):
                load.end()
            print(json.dumps(asdict(load.look())), flush=True)
        load.end()


def main() -> None:
    role, settings, *direction = sys.argv[1:]
    if role == "target":
        target(TransferSettings(**json.loads(settings)))
    else:
        initiator(TransferSettings(**json.loads(settings)), "write" if direction == ["write"] else "read")


if __name__ == "__main__":
    main()
