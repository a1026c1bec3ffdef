"""Bits that change in a node's memory, in its index, in NVMe's file and on the wire: what is damaged reaches no caller."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.settings import Size
from kvstore.protocol.shared_index import KEY, key_words_for
from kvstore.testing.transfer.awaited import eventually
from tests.faults.bits import Memory, Wire, flip_in_file
from tests.ports import free_ports
from tests.system.history import value_of
from tests.system.running import System, running_system

SMALL, LARGE = 2 << 10, 300 << 10
"""Compared with its checksum wherever it is read; in shared memory only where everything is."""
MEDIUM: Final = 40 << 10
"""Compared with its checksum; too large to come with an answer."""
MANY: Final = 40
"""Keys of a batch that is read as columns."""
ALL: Final = ClientSettings(verify_all=True)
DAMAGED: Final = 100
"""Offset in a value at which a bit changes."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another process's memory is written by root")


def in_view(client: Client, key: bytes) -> bytes | None:
    with client.view(key) as memory:
        return None if memory is None else bytes(memory)


def in_batch(client: Client, key: bytes) -> bytes | None:
    return client.get_batch([b"none-%d" % number for number in range(MANY)] + [key])[-1]


def in_few(client: Client, key: bytes) -> bytes | None:
    return client.get_batch([b"none", key])[1]


def in_range(client: Client, key: bytes) -> bytes | None:
    room = bytearray(DAMAGED + 1)
    [size] = client.get_ranges_into([key], [0], [room])
    if isinstance(size, KVStoreError):
        raise size
    return None if size is None else bytes(room)


READS: Final[list[Callable[[Client, bytes], bytes | None]]] = [Client.get, in_view, in_batch, in_few, in_range]


def is_withheld(read: Callable[[Client, bytes], bytes | None], client: Client, key: bytes) -> bool:
    """A miss, or an error that says so."""
    try:
        return read(client, key) is None
    except KVStoreError:
        return True


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("flips"), "--dram 32MiB") as system:
        yield system


@pytest.mark.promise("bit-flips")
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("how", ["shared memory", "asking", "elsewhere"])
def test_flipped_dram_value_is_not_returned_with_verify(
    running: System, how: str, size: int, read: Callable[[Client, bytes], bytes | None]
) -> None:
    key = b"dram/%b/%d/%b" % (how.encode(), size, read.__name__.encode())
    value = value_of(key, 0, size)
    settings = ClientSettings(verify_all=True, use_index=False) if how == "asking" else ALL
    with running.client() as writer:
        writer.put(key, value)
    with (running.remote_client if how == "elsewhere" else running.client)(settings=settings) as client:
        assert read(client, key) == value[: None if read is not in_range else DAMAGED + 1]
        memory = Memory(running.nodes["n0"].pid, "kvstore")
        [address] = memory.find(value[: 4 * DAMAGED])
        memory.flip(address + DAMAGED)
        assert is_withheld(read, client, key)
        memory.flip(address + DAMAGED)
        assert read(client, key) is not None, "nothing else has become of it"


def into_buffer(client: Client, key: bytes) -> bytes | None:
    room = bytearray(MEDIUM)
    size = client.get_into(key, room)
    return None if size is None else bytes(room[:size])


@pytest.mark.promise("bit-flips")
@pytest.mark.parametrize("read", [Client.get, into_buffer])
@pytest.mark.parametrize("size", [SMALL, MEDIUM])
def test_flipped_single_dram_value_is_not_returned(running: System, size: int, read: Callable[[Client, bytes], bytes | None]) -> None:
    key = b"single/%d/%b" % (size, read.__name__.encode())
    value = value_of(key, 0, size)
    with running.client() as client:
        client.put(key, value)
        eventually(lambda: read(client, key) == value and bool(client._operations.local.ready), "the node's index is read")
        memory = Memory(running.nodes["n0"].pid, "kvstore")
        [address] = memory.find(value[: 4 * DAMAGED])
        memory.flip(address + DAMAGED)
        assert is_withheld(read, client, key)
        memory.flip(address + DAMAGED)
        assert read(client, key) == value


@pytest.mark.promise("bit-flips")
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_flipped_index_entry_never_leads_to_other_bytes(running: System, size: int) -> None:
    key, other = b"the key that is looked up/%d" % size, b"the key of its neighbour/%d" % size
    values = {key: value_of(key, 0, size), other: value_of(other, 0, size)}
    choose = random.Random(size)
    with running.client(settings=ALL, deadline_s=5.0) as client:
        client.put_batch(list(values), list(values.values()))
        memory = Memory(running.nodes["n0"].pid, "kvstore-index")
        # The first reader requests reader slots, which creates the index. If the node responds late, a later read requests them again.
        eventually(lambda: client.get(key) == values[key] and bool(memory.find(key)), "the block is shown")
        [entry] = [address - 8 * KEY for address in memory.find(key)]
        for word in range(KEY + key_words_for(len(key))):
            for bit in choose.sample(range(64), 4):
                memory.flip(entry + 8 * word + bit // 8, bit % 8)
                for read in (Client.get, in_view, in_few):
                    assert read(client, key) in (None, values[key]), f"word {word}, bit {bit}"
                    assert read(client, other) == values[other]
                memory.flip(entry + 8 * word + bit // 8, bit % 8)
        assert client.get(key) == values[key]


@pytest.mark.promise("bit-flips")
def test_flipped_nvme_bits_are_misses_and_rest_is_read(tmp_path: Path) -> None:
    with running_system(tmp_path, f"--dram 1MiB --nvme {tmp_path / 'nvme'}:64MiB") as system:
        keys = [b"block-%d" % number for number in range(40)]
        values = [value_of(key, 0, LARGE) for key in keys]
        with system.client() as client:
            for key, value in zip(keys, values, strict=True):
                client.put(key, value)
            system.await_settled()
            damaged = [
                key
                for key, value in zip(keys, values, strict=True)
                if key[-1] % 2 and flip_in_file(tmp_path / "nvme" / "values", value[:64], DAMAGED)
            ]
            assert len(damaged) > 10, "most of them are on NVMe only"
            found = dict(zip(keys, [client.get(key) for key in keys], strict=True))
            in_dram = [key for key in damaged if found[key] is not None]
            assert len(in_dram) < len(damaged) / 2
            for key, value in zip(keys, values, strict=True):
                assert found[key] == value or (found[key] is None and key in damaged)


@pytest.mark.promise("bit-flips")
@pytest.mark.parametrize("bit", [0, 7])
def test_flipped_wire_bit_is_reread_or_reported_not_stored(tmp_path: Path, bit: int) -> None:
    [port] = free_ports(1)
    with System(tmp_path) as system, Wire(("127.0.0.1", port)) as wire:
        system.start_master()
        system.start_node("n0", "--dram", "32MiB", "--listen", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{wire.port}")
        settings = ClientSettings(engine_min_bytes=Size(1 << 30))
        with system.remote_client(settings=settings, deadline_s=5.0) as client:
            for number, size in enumerate((SMALL, LARGE)):
                key, put = b"value-%d" % number, b"put-%d" % number
                value = value_of(key, 0, size)
                client.put(key, value)
                count = 0

                def damage(piece: bytearray, marks: bytes = value[-64:]) -> None:
                    nonlocal count
                    place = piece.find(marks)
                    if place >= 0:
                        piece[place] ^= 1 << bit
                        count += 1

                wire.damage = damage
                assert is_withheld(Client.get, client, key)
                assert is_withheld(lambda one, name, value=value: one.put(name, value) or None, client, put)  # type: ignore[misc]
                assert count >= 2, "each of them was damaged"
                wire.damage = lambda piece: None
                assert client.get(put) is None
                assert client.get(key) == value
