"""A client under faults, as a process: it puts, reads, replaces and removes blocks that describe themselves, and keeps a journal of it.

Its operations are generators that yield calls of a client, the same for the blocking and the asynchronous client.

- SIGUSR1 interrupts the current operation: the signal handler raises, or a task is cancelled.
- SIGUSR2 forks the process: the child calls its parent's client, must get the error Forked, and ends.
- SIGTERM ends it after the current operation.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvstore.client import operations
from kvstore.client.aio import AsyncClient
from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.protocol.errors import Fenced, Forked, Retry
from tests.faults.fail_points import watch
from tests.faults.journal import ACKS, Act, BlockName, Board, Journal, Outcome
from tests.faults.points import POINTS
from tests.system.history import value_of, version_of

SIZES: Final = (200, 200, 4 << 10, 4 << 10, 40 << 10, 300 << 10)
"""Sent in one frame, written through shared memory, by the transfer engine."""
KEPT: Final = 48
"""Blocks that a writer keeps at a time. At this number it removes the oldest."""
BATCH: Final = 8
TASKS: Final = 3
"""Concurrent tasks of an asynchronous client."""
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of the client, by name, and its arguments."""
Step = Generator[Call, Any, None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a client process, passed as JSON."""

    masters: str
    folder: str
    """Of journals and the board."""
    writer: int
    life: int
    writers: int
    deadline_s: float
    is_async: bool = False
    is_far: bool = False
    """The client treats every node as remote."""
    tenant: str = ""
    token: str = ""
    pause_s: float = 0.0
    """Pause after each operation, to limit the load on the processors."""

    def packed(self) -> str:
        """Its command line."""
        return json.dumps(asdict(self))

    @property
    def journal(self) -> Path:
        return Path(self.folder) / f"client-{self.writer}-{self.life}.journal"


class Struck(BaseException):
    """Raised by the signal's handler."""


class Actor:
    """Chooses operations and records their results. `is_over` is set when the process shall end."""

    def __init__(self, plan: Plan) -> None:
        self.is_over = False
        self.plan = plan
        self._random = random.Random(plan.writer << 16 | plan.life)
        self._journal = Journal(plan.journal)
        self._board = Board(Path(plan.folder) / "board", plan.writers)
        self._kept: dict[int, int] = {}
        """Numbers of blocks that should be there, the oldest first, and their versions."""
        self._next = 0

    def next_step(self) -> Step:
        choice = self._random.random()
        if len(self._kept) >= KEPT:
            return self._remove(next(iter(self._kept)))
        if choice < 0.22 or not self._kept:
            return self._put()
        if choice < 0.27:
            return self._replace(self._random.choice(list(self._kept)))
        if choice < 0.32:
            return self._remove(self._random.choice(list(self._kept)))
        if choice < 0.36:
            return self._other("flush", ())
        if choice < 0.42:
            return self._other("match_prefix", ([block.key for block in self._blocks(4)],))
        if choice < 0.54:
            return self._get_batch(self._blocks(BATCH))
        if choice < 0.66:
            return self._get("view", self._block())
        return self._get("get", self._block())

    # --- what is read ---

    def _blocks(self, count: int) -> list[BlockName]:
        return list({block.packed(): block for block in (self._block() for _ in range(count))}.values())

    def _block(self) -> BlockName:
        """Return the name of a block of this client, or of a recent block of any writer."""
        plan = self.plan
        if self._kept and self._random.random() < 0.5:
            return BlockName(plan.writer, plan.life, self._random.choice(list(self._kept)))
        writer = self._random.randrange(plan.writers)
        life, count = self._board.told(writer)
        return BlockName(writer, life, max(0, count - 1 - self._random.randrange(KEPT)))

    def _get(self, how: str, block: BlockName) -> Step:
        def note(value: bytes | None, began_ns: int) -> None:
            self._note_read(block, value, began_ns, time.monotonic_ns())

        yield from self._called((how, (block.key,), {}), Act.GET, [block], note)

    def _get_batch(self, blocks: list[BlockName]) -> Step:
        def note(values: list[bytes | None], began_ns: int) -> None:
            ended_ns = time.monotonic_ns()
            for block, value in zip(blocks, values, strict=True):
                self._note_read(block, value, began_ns, ended_ns)

        yield from self._called(("get_batch", ([block.key for block in blocks],), {}), Act.GET, blocks, note)

    def _note_read(self, block: BlockName, value: bytes | None, began_ns: int, ended_ns: int) -> None:
        outcome, version = Outcome.ABSENT, 0
        if value is not None:
            try:
                version, outcome = version_of(block.key, value), Outcome.DONE
            except Exception as error:  # of any kind, since the bytes are arbitrary
                outcome = Outcome.WRONG
                _say(f"wrong bytes: {error}")
        self._journal.note(Act.GET, outcome, block.packed(), began_ns, ended_ns, version=version)

    # --- what is written ---

    def _put(self) -> Step:
        block = BlockName(self.plan.writer, self.plan.life, self._next)
        self._next += 1
        self._board.tell(block.writer, block.life, self._next)
        yield from self._stored(block, 0, self._random.choice(("put", "put_batch")))

    def _replace(self, number: int) -> Step:
        # No other writer uses this key. If this operation is interrupted, the stored version is unknown and the key is not written again.
        block, version = BlockName(self.plan.writer, self.plan.life, number), self._kept.pop(number) + 1
        yield from self._stored(block, version, "replace")

    def _stored(self, block: BlockName, version: int, how: str) -> Step:
        value = value_of(block.key, version, self._random.choice(SIZES))
        copies: dict[str, Any] = {"ack": "replicas", "replicas": 2} if how != "replace" else {"ack": "cluster"}
        options: dict[str, Any] = self._random.choice([{"ack": "node"}, {"ack": "cluster"}, copies])
        ack = ACKS.index(options["ack"])
        self._journal.note(Act.PUT, Outcome.BEGUN, block.packed(), time.monotonic_ns(), 0, version=version, ack=ack)

        def note(stored: bool | list[bool], began_ns: int) -> None:
            # For a new key, "already there" means that a reply was lost and the client sent the request again.
            outcome = Outcome.DONE if stored in (True, [True]) or how != "replace" else Outcome.ABSENT
            self._journal.note(Act.PUT, outcome, block.packed(), began_ns, time.monotonic_ns(), version=version, ack=ack)

        arguments: tuple[Any, ...] = (block.key, value) if how == "put" else ([block.key], [value])
        yield from self._called((how, arguments, options), Act.PUT, [block], note, version=version, ack=ack)
        self._kept[block.number] = version
        if self._random.random() < 0.3:
            if not ack:
                yield from self._other("flush", ())  # until then the block may be missing in the directory
            yield from self._locate(block)

    def _locate(self, block: BlockName) -> Step:
        def note(locations: list[list[Any]], began_ns: int) -> None:
            # After a failover, the master may not have the node's name yet.
            mask = sum({1 << int(location.node[1:]) for location in locations[0] if location.node})
            self._journal.note(Act.LOCATE, Outcome.DONE, block.packed(), began_ns, time.monotonic_ns(), version=mask)

        yield from self._called(("locate", ([block.key],), {}), Act.LOCATE, [block], note)

    def _remove(self, number: int) -> Step:
        block = BlockName(self.plan.writer, self.plan.life, number)
        self._kept.pop(number)
        self._journal.note(Act.REMOVE, Outcome.BEGUN, block.packed(), time.monotonic_ns(), 0)

        def note(count: int, began_ns: int) -> None:
            outcome = Outcome.DONE if count else Outcome.ABSENT
            self._journal.note(Act.REMOVE, outcome, block.packed(), began_ns, time.monotonic_ns())

        yield from self._called(("remove", ([block.key],), {}), Act.REMOVE, [block], note)

    def _other(self, how: str, arguments: tuple[Any, ...]) -> Step:
        def note(_result: Any, began_ns: int) -> None:
            self._journal.note(Act.OTHER, Outcome.DONE, 0, began_ns, time.monotonic_ns())

        yield from self._called((how, arguments, {}), Act.OTHER, [BlockName(0, 0, 0)], note)

    def _called(
        self, call: Call, act: Act, blocks: list[BlockName], note: Callable[[Any, int], None], *, version: int = 0, ack: int = 0
    ) -> Step:
        began_ns = time.monotonic_ns()
        try:
            result = yield call
        except (Retry, Fenced):
            outcome = Outcome.FAILED
        except Exception as error:
            outcome = Outcome.UNEXPECTED
            _say(f"{call[0]}: {type(error).__name__}: {error}")
        else:
            note(result, began_ns)
            return
        ended_ns = time.monotonic_ns()
        for block in blocks:
            self._journal.note(act, outcome, block.packed(), began_ns, ended_ns, version=version, ack=ack)


# --- driving them ---


class Blocking:
    """One operation after the other, in the main thread."""

    def __init__(self, actor: Actor, client: Client) -> None:
        self._actor = actor
        self._client = client
        self._is_inside = False
        signal.signal(signal.SIGUSR1, self._strike)

    def run(self) -> None:
        while not self._actor.is_over:
            time.sleep(self._actor.plan.pause_s)
            step = self._actor.next_step()
            try:
                call = next(step)
                while True:
                    call = self._done(step, call)
            except StopIteration:
                pass
            except Struck:
                step.close()

    def _done(self, step: Step, call: Call) -> Call:
        """Execute `call` and return the next one. Raises StopIteration at the end of the step."""
        try:
            try:
                self._is_inside = True
                result = self._result(call)
            finally:
                self._is_inside = False
        except Exception as error:
            return step.throw(error)
        return step.send(result)

    def _result(self, call: Call) -> Any:
        name, arguments, options = call
        if name == "view":
            with self._client.view(*arguments) as memory:
                return None if memory is None else bytes(memory)
        return getattr(self._client, name)(*arguments, **options)

    def _strike(self, *_: object) -> None:
        if self._is_inside:
            raise Struck


class Tasks:
    """Several concurrent operations in an event loop."""

    def __init__(self, actor: Actor, client: AsyncClient) -> None:
        self._actor = actor
        self._client = client

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._work()) for _ in range(TASKS)]

        def strike() -> None:
            place = random.randrange(TASKS)
            tasks[place].cancel()
            tasks[place] = loop.create_task(self._work())

        loop.add_signal_handler(signal.SIGUSR1, strike)
        while not self._actor.is_over:
            await asyncio.sleep(0.05)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while not self._actor.is_over:
            await asyncio.sleep(self._actor.plan.pause_s)
            step = self._actor.next_step()
            with contextlib.suppress(StopIteration):
                call = next(step)
                while True:
                    try:
                        result = await self._result(call)
                    except Exception as error:
                        call = step.throw(error)
                    else:
                        call = step.send(result)

    async def _result(self, call: Call) -> Any:
        name, arguments, options = call
        if name == "view":
            async with self._client.view(*arguments) as memory:
                return None if memory is None else bytes(memory)
        method: Callable[..., Awaitable[Any]] = getattr(self._client, name)
        return await method(*arguments, **options)


def fork(call: Callable[[], object]) -> None:
    """Fork a child whose call of its parent's client must raise Forked."""
    child = os.fork()
    if not child:
        status = 1
        try:
            call()
        except Forked:
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        _say("a forked child was not told by name that the client is another process's")
        os._exit(1)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    watch(POINTS)
    if plan.is_far:
        setattr(operations, "is_local_socket", lambda _unix, _host_id: False)  # noqa: B010 - what clients find their host by
    actor = Actor(plan)

    def end(*_: object) -> None:
        actor.is_over = True

    signal.signal(signal.SIGTERM, end)
    settings = replace(ClientSettings(), peer_timeout_s=1.0)
    if plan.is_async:
        asyncio.run(_run_tasks(plan, actor, settings))
    else:
        with Client(plan.masters, tenant=plan.tenant, token=plan.token, settings=settings, deadline_s=plan.deadline_s) as client:
            signal.signal(signal.SIGUSR2, lambda *_: fork(lambda: client.get(b"anything")))
            print(json.dumps({"event": "ready"}), flush=True)
            Blocking(actor, client).run()
    print(json.dumps({"event": "over"}), flush=True)


async def _run_tasks(plan: Plan, actor: Actor, settings: ClientSettings) -> None:
    async with AsyncClient(plan.masters, tenant=plan.tenant, token=plan.token, settings=settings, deadline_s=plan.deadline_s) as client:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: fork(lambda: asyncio.run(client.get(b"anything"))))
        print(json.dumps({"event": "ready"}), flush=True)
        await Tasks(actor, client).run()


if __name__ == "__main__":
    main()
