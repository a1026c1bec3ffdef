"""A node whose NVMe is full, fails at some write, or takes its time, by the kernel's own word: nothing that is returned is wrong, the tiers
that work go on, and a disk that works again is used again."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from kvstore.client.sync import Client
from tests.faults import devices
from tests.system.history import value_of
from tests.system.running import System, until

SIZE: Final = 128 << 10
DRAM_BLOCKS: Final = 32
BATCH: Final = DRAM_BLOCKS // 2
"""Put at once: DRAM has room for them."""
FLAGS: Final = ("--dram", f"{DRAM_BLOCKS * SIZE >> 20}MiB", "--tier-retry-s", "0.1")
TRACED = pytest.mark.skipif(bool(devices.why_not()), reason=devices.why_not() or "-")


class Disk:
    """A node with NVMe in `folder`, and a client that puts blocks and reads them all."""

    def __init__(self, system: System, folder: Path, client: Client) -> None:
        self.system = system
        self._folder = folder
        self._client = client
        self._keys: list[bytes] = []

    def file(self, name: str = "values") -> Path:
        """`values`, or `data.mdb` with their headers."""
        return self._folder / name

    def put(self, batches: int = 1) -> list[bytes]:
        """New blocks. All are stored, however little room there is below."""
        new = [b"block-%d" % (len(self._keys) + number) for number in range(batches * BATCH)]
        for start in range(0, len(new), BATCH):
            part = new[start : start + BATCH]
            assert self._client.put_batch(part, [value_of(key, 0, SIZE) for key in part]) == [True] * BATCH
        self._keys += new
        return new

    def found(self, keys: Sequence[bytes] | None = None) -> int:
        """Return the number of keys that are found; check that each value is the one that was put."""
        count = 0
        for key in self._keys if keys is None else keys:
            value = self._client.get(key)
            assert value in (None, value_of(key, 0, SIZE)), key
            count += value is not None
        return count

    @property
    def demoted(self) -> int:
        return next(tier.blocks for tier in self.system.node_status().tiers if tier.name == "nvme")

    @property
    def health(self) -> str:
        return next(tier.health for tier in self.system.node_status().tiers if tier.name == "nvme")

    @property
    def pid(self) -> int:
        return self.system.nodes["n0"].pid

    def takes_blocks(self) -> None:
        """Blocks that come from now on go down."""

        def more() -> bool:
            before = self.demoted
            self.put()
            self.system.await_settled()
            return self.demoted > before

        until(more, "the disk accepts blocks again", max_every_s=0)


@contextmanager
def started(folder: Path, nvme: Path) -> Iterator[Disk]:
    with System(folder) as system:
        system.start_master()
        system.start_node("n0", *FLAGS, "--nvme", f"{nvme}:48MiB")
        with system.client() as client:
            yield Disk(system, nvme, client)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with started(tmp_path, tmp_path / "nvme") as disk:
        yield disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "kvstore-test", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this machine lets nothing be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.promise("resources-exhausted")
def test_full_file_system_is_bypassed_until_it_has_space(tmp_path: Path, small_disk: Path) -> None:
    with started(tmp_path, small_disk / "nvme") as disk:
        disk.put(4)
        disk.system.await_settled()
        went_down = disk.demoted
        assert went_down > 0
        ballast = small_disk / "ballast"
        with ballast.open("wb") as file:
            disk_left = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            os.posix_fallocate(file.fileno(), 0, disk_left)
        newest = disk.put(4)[-BATCH:]
        assert disk.found(newest) == BATCH, "DRAM goes on, and gives up what is coldest"
        assert disk.found() >= went_down + BATCH, "what was written before is there"
        ballast.unlink()
        disk.takes_blocks()
        disk.found()


FILES = pytest.mark.parametrize("file", ["values", "data.mdb"])


@pytest.mark.promise("resources-exhausted")
@TRACED
@pytest.mark.parametrize(("file", "number"), [("values", 1), ("data.mdb", 3)])
def test_a_write_for_which_there_is_no_room_loses_nothing(disk: Disk, number: int, file: str) -> None:
    first = disk.put()
    with devices.refusing_writes(disk.pid, disk.file(file), "ENOSPC", when=str(number)):
        keys = [*first, *disk.put(3)]
        disk.system.await_settled()
    assert disk.found(keys[-BATCH:]) == BATCH
    disk.takes_blocks()
    assert disk.health == "ok"
    disk.found()


@pytest.mark.promise("resources-exhausted")
@TRACED
@pytest.mark.parametrize(
    ("file", "call", "number"),
    [("values", "pwritev2", 1), ("data.mdb", "pwritev", 1), ("data.mdb", "pwrite64", 1), ("data.mdb", "pwrite64", 2)],
)
def test_one_write_that_fails_is_outlived(disk: Disk, file: str, call: str, number: int) -> None:
    """Of values, of their headers, of the page that makes a transaction count."""
    disk.put()
    with devices.refusing_writes(disk.pid, disk.file(file), "EIO", when=str(number), calls=call):
        assert disk.found(disk.put(3)[-BATCH:]) == BATCH
        disk.system.await_settled()
    disk.takes_blocks()
    disk.found()


@pytest.mark.promise("resources-exhausted")
@TRACED
@FILES
def test_a_disk_that_fails_for_good_is_left_and_dram_goes_on(disk: Disk, file: str) -> None:
    disk.put(3)
    disk.system.await_settled()
    with devices.refusing_writes(disk.pid, disk.file(file), "EIO"):
        until(lambda: bool(disk.put()) and disk.health != "ok", "the node says that its disk is out of order")
    assert disk.found(disk.put(2)[-BATCH:]) == BATCH
    disk.found()


@pytest.mark.promise("resources-exhausted")
@TRACED
def test_slow_fsync_leaves_dram_reads_fast_and_puts_waiting(disk: Disk) -> None:
    first = disk.put()
    with devices.slow_syncs(disk.pid, disk.file(), 0.3):
        assert disk.found(first) == BATCH
        newest = disk.put(4)[-BATCH:]
        assert disk.found(newest) == BATCH
    disk.system.await_settled()
    assert disk.found() == 5 * BATCH, "all of it is there: nothing was given up"
