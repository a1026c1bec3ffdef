"""A master to talk to: in this process with its loop in a thread, or in a process of its own; and a node's side of its protocol."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from kvstore.master.config import MasterSettings
from kvstore.master.master import Master
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import PHASE_STREAM, PHASE_SYNC_BEGIN, PHASE_SYNC_END, Heartbeat, HeartbeatResponse
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.protocol.errors import from_code
from kvstore.protocol.frames import HEADER_BYTES, FrameHeader, pack_header, unpack_header
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, Failure, Hello, Ok, Welcome
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.grpc_metadata import as_metadata
from tests.forked import Forked
from tests.master.blocks import Event, publish

M = TypeVar("M", bound=Message)
TIMEOUT_S: Final = 30.0
MASTER: Final = ("tests.tuned_daemon", "kvstore-master")


@dataclass(slots=True)
class Places:
    """Addresses of a running master."""

    listen: str
    unix: str
    control: str
    http: str = ""
    console: str = ""
    pid: int = 0
    role: str = ""
    master: Master | None = None
    """The master itself, if it is in this process: for state without a network interface."""

    @property
    def epoch(self) -> int:
        """Of a master of this process that owns its catalog."""
        assert self.master is not None
        return self.master.partitions[0].role_manager.leader().epoch

    def replicate(self, tenant: str, keys: Sequence[bytes], *, node_id: int, source_node_id: int) -> int:
        """Have the master order copies: how many it did."""
        master = self.master
        assert master is not None

        def order() -> int:
            frames = master.partitions[0].role_manager.leader().frames
            return frames.nodes.replicate(tenant, keys, node_id=node_id, source_node_id=source_node_id)

        return master.reactor.call(order, deadline_s=TIMEOUT_S)

    def reserved_bytes(self, node_id: int) -> int:
        """Bytes that the master has reserved at the node since its last heartbeat."""
        master = self.master
        assert master is not None
        node = master.partitions[0].role_manager.leader().directory.members.get(node_id)
        assert node is not None
        return master.reactor.call(lambda: node.reserved_bytes, deadline_s=TIMEOUT_S)

    def client(self, tenant: str = "red", token: str = "") -> Channel:
        return Channel.open(parse_address(self.listen), Hello(ROLE_CLIENT, tenant, token), Deadline(TIMEOUT_S))

    def client_welcome(self) -> Welcome:
        """Its response to a client's Hello."""
        client = self.client()
        client.close()
        return client.welcome

    @contextlib.contextmanager
    def stub(self) -> Iterator[ControlStub]:
        with grpc.insecure_channel(self.control) as channel:
            yield ControlStub(channel)  # type: ignore[no-untyped-call]


def ask(channel: Channel, message: Message, answer: type[M], timeout_s: float = TIMEOUT_S) -> M:
    return channel.call(message, answer, Deadline(timeout_s))


@contextlib.contextmanager
def master_in_thread(folder: Path, **settings: Any) -> Iterator[Places]:
    """A master of this process, stopped and closed at the end. `wall_s`, no setting, is the clock by which tokens end."""
    wall_s: Callable[[], float] = settings.pop("wall_s", time.time)
    defaults: dict[str, Any] = {"listen": "127.0.0.1:0", "control": "127.0.0.1:0", "run_dir": str(folder), "slow_start_s": 0.0}
    master = Master(MasterSettings(**(defaults | settings)), wall_s=wall_s)
    places = master.start()
    thread = threading.Thread(target=master.reactor.run)
    thread.start()
    try:
        yield Places(places.listen, places.unix, places.control, places.http, places.console, master=master)
    finally:
        master.reactor.stop()
        thread.join()
        master.close()


@dataclass(slots=True)
class MasterProcess:
    """`kvstore-master` as a process, which is forked (tests/forked.py); `places` once it has said that it is ready."""

    folder: Path
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: Forked | None = None

    def start(self) -> Places:
        flags = ("--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--run-dir", str(self.folder), *self.flags)
        self.process = Forked(MASTER[0], [MASTER[1], *flags], environment=os.environ | self.environment)
        facts = self.next_line()
        assert facts.pop("event") == "ready"
        return Places(**facts)

    def next_line(self) -> dict[str, Any]:
        """Its next line on standard output; the test's own timeout ends the wait."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end()
        facts: dict[str, Any] = json.loads(line)
        return facts

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.end()

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.end()[0]

    def end(self) -> tuple[int, str]:
        """Wait for the end: (exit code, standard error)."""
        assert self.process is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if self.process.stdout.closed:  # it was killed before
            return self.process.wait(TIMEOUT_S), ""
        with self.process.stdout, self.process.stderr:
            errors = self.process.stderr.read()
            return self.process.wait(TIMEOUT_S), errors


def refusal(*flags: str) -> tuple[int, str]:
    """(exit code, standard error) of a master that cannot start."""
    command = [sys.executable, "-m", *MASTER, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stderr


class NodeSide:
    """A node as a master sees it: registers, says Hello, publishes, and answers commands when told to."""

    def __init__(
        self,
        places: Places,
        name: str = "one",
        instance: int = 1,
        dram_bytes: int = 1 << 30,
        transfer: bytes = b"",
        *,
        token: str = "",
    ) -> None:
        with places.stub() as stub:
            tier = pb.TierStatus(name="dram", capacity_bytes=dram_bytes, health="ok")
            request = pb.RegisterRequest(name=name, instance=instance, version="1", host_id="host", unix="/u", tcp="t:1", tiers=[tier])
            request.transfer = transfer
            self.registration = stub.Register(request, timeout=TIMEOUT_S, metadata=as_metadata("", token))
        address = parse_address(places.listen)
        self.sock = socket.create_connection((address.host, address.port), TIMEOUT_S)
        self.hello = Hello(ROLE_NODE, token=token, name=name, epoch=self.registration.registration_epoch)
        self.ask(self.hello)

    def ask(self, message: Message) -> tuple[FrameHeader, bytes]:
        body = message.pack()
        self.sock.sendall(pack_header(message.TYPE, 1, len(body), 0, 10_000) + body)
        return self.read()

    def read(self) -> tuple[FrameHeader, bytes]:
        header = unpack_header(self._exactly(HEADER_BYTES))
        return header, self._exactly(header.body_bytes)

    def answer(self, header: FrameHeader, message: Message) -> None:
        body = message.pack()
        self.sock.sendall(pack_header(message.TYPE, header.request_id, len(body)) + body)

    def beat(self, **told: Any) -> pb.HeartbeatReply:
        """Send a heartbeat with these fields; the answer. Raises the master's error."""
        told = {"node_id": self.registration.node_id, "registration_epoch": self.registration.registration_epoch, **told}
        header, body = self.ask(Heartbeat(pb.HeartbeatRequest(**told).SerializeToString()))
        if header.type == Failure.TYPE:
            failure = Failure.unpack(body)
            raise from_code(failure.code, failure.text)
        return pb.HeartbeatReply.FromString(HeartbeatResponse.unpack(body).reply)

    def publish(self, *events: Event, phase: int = PHASE_STREAM) -> None:
        header, _body = self.ask(publish(self.registration.registration_epoch, events, phase))
        assert header.type == Ok.TYPE, _body

    def sync(self, *events: Event) -> None:
        self.publish(phase=PHASE_SYNC_BEGIN)
        self.publish(*events, phase=PHASE_SYNC_END)

    def close(self) -> None:
        self.sock.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = self.sock.recv(size - len(data))
            assert got, "the master hung up"
            data += got
        return data


def unix_client(places: Places) -> Channel:
    return Channel.open(Address(unix=places.unix), Hello(ROLE_CLIENT, "red"), Deadline(TIMEOUT_S))
