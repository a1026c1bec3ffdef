"""Promises of shm/target.py: descriptors for those who show keys, and a table of the open regions."""

import ctypes
import mmap
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.protocol.errors import (
    Closed,
    ConfigError,
    Denied,
    Full,
    ProtocolError,
    StaleHandle,
    Unavailable,
)
from kvstore.protocol.session_messages import Hello
from kvstore.protocol.transfers import ROLE_AGENT, Attach
from kvstore.rpc.address import Address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.memory.mapped_memory import allocate, map_slab
from kvstore.transfer.memory.region import Exports, Region
from kvstore.transfer.shm.target import CLOSED_COUNT, LiveRegions, SharedTarget
from tests.rpc.wires import frame, read_frame

SIZE = 10_000
NOBODY = 65_534


@pytest.fixture
def regions() -> Iterator[LiveRegions]:
    regions = LiveRegions(3)
    yield regions
    regions.close()


def read_only(regions: LiveRegions) -> int:
    return os.open(f"/proc/self/fd/{regions.fd}", os.O_RDONLY | os.O_CLOEXEC)


def as_seen(regions: LiveRegions) -> npt.NDArray[np.uint64]:
    return np.frombuffer(map_slab(read_only(regions), regions.size_bytes, writable=False).memory, np.uint64)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    lowest_free = os.dup(0)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_read_only_descriptor_cannot_write_to_the_table(regions: LiveRegions) -> None:
    fd = read_only(regions)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, regions.size_bytes)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, regions.size_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"\1", 0)
    for size_bytes in (0, 2 * regions.size_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(again, size_bytes)
    os.close(again)
    os.close(fd)


def test_without_a_descriptor_left_it_says_so() -> None:
    with no_descriptor_left(), pytest.raises(Full, match="no descriptor is left"):
        LiveRegions()


def test_a_forked_child_closes_no_region_of_its_parents(regions: LiveRegions, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, index = as_seen(regions), regions.add(7)
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        regions.remove(index)
    assert (seen[index], seen[CLOSED_COUNT]) == (7, 0)


@pytest.fixture
def target() -> Iterator[SharedTarget]:
    target = SharedTarget("owner", Exports(), max_connections=10, max_regions=3)
    yield target
    target.close()


@pytest.fixture
def region(target: SharedTarget) -> Iterator[Region]:
    region = allocate(SIZE)
    target.export(region)
    yield region
    region.close()


@pytest.fixture
def channel(target: SharedTarget) -> Iterator[Channel]:
    channel = Channel.open(Address(unix=target.path), Hello(ROLE_AGENT, name="user"), Deadline(10))
    yield channel
    channel.close()


def attach(channel: Channel, region_id: int, key: int, *, writable: bool = False) -> int:
    """The descriptor, of SIZE bytes."""
    answer, [fd] = channel.call_for_fds(Attach(region_id, key, int(writable)), Deadline(10))
    assert list(answer.sizes) == [SIZE]
    return fd


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- access ---


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_process_of_another_user_cannot_even_enter_the_folder() -> None:
    program = "import os, socket, sys; os.setuid(int(sys.argv[2])); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with tempfile.TemporaryDirectory() as index:
        os.chmod(index, 0o755)
        target = SharedTarget("owner", Exports(), max_connections=10, run_dir=Path(index, "run"))

        def error_of(user: int) -> str:
            command = [sys.executable, "-c", program, target.path, str(user)]
            return subprocess.run(command, capture_output=True, text=True, timeout=120).stderr

        assert "PermissionError" in error_of(NOBODY)
        os.chmod(target.path, 0o666)  # so it is the folder that keeps it out
        assert "PermissionError" in error_of(NOBODY)
        os.chmod(Path(index, "run"), 0o755)
        assert error_of(NOBODY) == ""
        target.close()


def test_a_folder_that_cannot_be_used_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = descriptors(), threading.active_count()
    with pytest.raises(ConfigError, match="cannot listen"):
        SharedTarget("owner", Exports(), max_connections=1, run_dir=tmp_path / "file")
    assert (descriptors(), threading.active_count()) == before


def test_a_peer_that_does_not_introduce_itself_is_refused(target: SharedTarget, region: Region) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(target.path)
        sock.sendall(frame(Attach(0, 0), 1))
        _, failure, _ = read_frame(sock)
        assert (getattr(failure, "code", 0), "begins with Hello" in getattr(failure, "text", "")) == (ProtocolError.code, True)


# --- descriptors of regions ---
@pytest.mark.parametrize("with_write_key", [False, True])
def test_a_read_descriptor_cannot_become_writable(channel: Channel, region: Region, with_write_key: bool) -> None:
    fd = attach(channel, region.region_id, region.write_key if with_write_key else region.read_key)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    slab = map_slab(fd, SIZE, writable=False)
    address = int(np.frombuffer(slab.memory, np.uint8).ctypes.data)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    region.memory[5] = 9
    assert slab.memory[5] == 9


def test_read_only_memory_is_not_exported_for_writing(target: SharedTarget, channel: Channel) -> None:
    whole = allocate(SIZE)
    region = Region(whole.memory.toreadonly(), fd=whole.fd)
    target.export(region)
    with pytest.raises(Denied, match="read-only"):
        attach(channel, region.region_id, region.write_key, writable=True)
    region.close()
    whole.close()


def test_exported_memory_that_is_not_shared_has_no_descriptor() -> None:
    exports, region = Exports(), Region(memoryview(bytearray(10)))
    exports.add(region)
    target = SharedTarget("owner", exports, max_connections=1)
    channel = Channel.open(Address(unix=target.path), Hello(ROLE_AGENT, name="user"), Deadline(10))
    with pytest.raises(StaleHandle, match="not shared memory"):
        attach(channel, region.region_id, region.read_key)
    assert region.users == 0
    channel.close()
    target.close()


def test_descriptors_for_a_disconnected_peer_are_closed(target: SharedTarget, region: Region) -> None:
    before = descriptors()
    for _ in range(20):
        channel = Channel.open(Address(unix=target.path), Hello(ROLE_AGENT, name="user"), Deadline(10))
        channel._send(Attach(region.region_id, region.read_key), Deadline(10))
        channel.close()
    eventually(lambda: descriptors() == before, "no descriptor more than before")


def test_out_of_descriptors_is_unavailable_and_transient(channel: Channel, region: Region) -> None:
    with no_descriptor_left(), pytest.raises(Unavailable, match="no descriptor of this memory"):
        attach(channel, region.region_id, region.read_key)
    os.close(attach(channel, region.region_id, region.read_key))


# --- regions that are open ---
@pytest.mark.parametrize("writable", [0, 1])
def test_the_live_table_needs_no_key_and_is_read_only(channel: Channel, region: Region, writable: int) -> None:
    answer, [fd] = channel.call_for_fds(Attach(0, 0, writable), Deadline(10))
    with pytest.raises(PermissionError):
        mmap.mmap(fd, answer.sizes[0])
    table = np.frombuffer(map_slab(fd, answer.sizes[0], writable=False).memory, np.uint64)
    assert region.region_id in table.tolist()[1:]


def test_more_regions_than_the_table_has_places_are_told(target: SharedTarget) -> None:
    regions = [allocate(1) for _ in range(4)]
    for region in regions[:3]:
        target.export(region)
    with pytest.raises(Full, match="close some"):
        target.export(regions[3])
    regions[0].close()
    assert target.export(regions[3]) is not None
    for region in regions:
        region.close()


def test_a_closed_target_exports_nothing(target: SharedTarget) -> None:
    before, after = allocate(1), allocate(1)
    target.export(before)
    target.close()
    target.close()
    with pytest.raises(Closed, match="the agent is closed"):
        target.export(after)
    before.close()
    after.close()
