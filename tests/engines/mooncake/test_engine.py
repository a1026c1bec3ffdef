"""Memory of other engines is read and written by its address, with Mooncake's calls and codes."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.engines.mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from kvstore.testing.transfer.awaited import eventually
from tests.engines.mooncake.memory import Room
from tests.ports import free_ports

P2P = "P2PHANDSHAKE"


def opened() -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", P2P, "tcp", "") == 0
    return engine


def name(engine: TransferEngine) -> str:
    return f"127.0.0.1:{engine.get_rpc_port()}"


@pytest.fixture
def pair() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    """An initiator and a target."""
    engines = opened(), opened()
    yield engines
    for engine in engines:
        engine._close()


def test_bytes_go_to_a_peer_and_back(pair: tuple[TransferEngine, TransferEngine]) -> None:
    here, there = pair
    local, remote = Room.of(b"0123456789"), Room(1000)
    assert there.register_memory(remote.at, 1000) == 0
    assert here.get_first_buffer_address(name(there)) == remote.at
    assert here.transfer_sync_write(name(there), local.at, remote.at + 500, 10) == 0
    assert remote.bytes()[500:510] == b"0123456789"
    assert here.transfer_sync_read(name(there), local.at + 2, remote.at + 500, 5) == 0
    assert local.bytes() == b"0101234789"
    assert here.transfer_sync(name(there), local.at, remote.at, 10, TransferOpcode.Write) == 0
    assert here.transfer_sync_write(name(there), local.at, remote.at, 0) == 0
    assert remote.bytes()[:10] == b"0101234789"


def test_batches_move_many_places(pair: tuple[TransferEngine, TransferEngine]) -> None:
    here, there = pair
    local, remote = Room.of(bytes(range(100))), Room(100)
    there.register_memory(remote.at, 100)
    here.register_memory(local.at, 100)
    places, sizes = np.arange(0, 100, 10), [10] * 10
    assert here.batch_transfer_sync_write(name(there), local.at + places, remote.at + places[::-1], sizes) == 0  # type: ignore[arg-type]
    assert remote.bytes() == b"".join(bytes(range(at, at + 10)) for at in range(90, -1, -10))
    read = [remote.at, remote.at + 90]
    assert here.batch_transfer_sync_read(name(there), [local.at, local.at + 10], read, [10, 10]) == 0
    assert local.bytes()[:20] == bytes(range(90, 100)) + bytes(range(10))
    assert here.batch_transfer_sync(name(there), [local.at], [remote.at], [5], TransferOpcode.Read) == 0
    assert here.batch_transfer_sync_write(name(there), [local.at], [remote.at], [1, 2]) == -1


def test_batches_run_beside_the_caller(pair: tuple[TransferEngine, TransferEngine]) -> None:
    here, there = pair
    local, remote = Room.of(b"value"), Room(10)
    there.register_memory(remote.at, 10)
    batches = [
        here.batch_transfer_async_write(name(there), [local.at], [remote.at], [5]),
        here.batch_transfer_async(name(there), [local.at], [remote.at + 5], [5], TransferOpcode.Write),
    ]
    assert here.get_batch_transfer_status(batches) == 0
    assert remote.bytes() == b"valuevalue"
    assert here.get_batch_transfer_status([here.batch_transfer_async_read(name(there), [local.at], [remote.at + 1], [5])]) == 0
    assert local.bytes() == b"aluev"
    number = here.transfer_submit_write(name(there), local.at, remote.at, 5)
    eventually(lambda: here.transfer_check_status(number) == 1, "the transfer is over")
    assert (here.transfer_check_status(number), here.get_batch_transfer_status([number])) == (-1, -1)


def test_notification_follows_its_transfer(pair: tuple[TransferEngine, TransferEngine]) -> None:
    here, there = pair
    local, remote = Room.of(b"value"), Room(5)
    there.register_memory(remote.at, 5)
    assert here.transfer_sync(name(there), local.at, remote.at, 5, TransferOpcode.Write, TransferNotify("name", "message")) == 0
    found: list[TransferNotify] = []

    def has_come() -> bool:
        found.extend(there.get_notifies())
        return bool(found)

    eventually(has_come, "the notification has come")
    assert [(one.name, one.msg) for one in found] == [("name", "message")]
    assert there.get_notifies() == []


def test_memory_that_is_not_registered_is_not_reached(pair: tuple[TransferEngine, TransferEngine]) -> None:
    here, there = pair
    local, remote = Room(10), Room(100)
    assert here.transfer_sync_write(name(there), local.at, remote.at, 10) == -1
    there.register_memory(remote.at, 50)
    assert here.transfer_sync_write(name(there), local.at, remote.at + 45, 10) == -1
    assert here.transfer_sync_write(name(there), local.at, remote.at, 10) == 0
    assert there.unregister_memory(remote.at) == 0
    assert here.transfer_sync_write(name(there), local.at, remote.at, 10) == -1
    there.register_memory(remote.at, 100)
    assert here.transfer_sync_write(name(there), local.at, remote.at + 90, 10) == 0


def test_registration_has_mooncakes_codes(pair: tuple[TransferEngine, TransferEngine]) -> None:
    engine, room = pair[0], Room(100)
    assert [engine.register_memory(room.at + at, 50) for at in (0, 0, 10, 49)] == [0, -7, -7, -7]
    assert [engine.unregister_memory(room.at + at) for at in (10, 0, 0)] == [-3, 0, -3]
    assert engine.batch_register_memory([room.at, room.at + 50], [50, 50]) == 0
    assert (engine.batch_register_memory([room.at], [50]), engine.batch_register_memory([room.at], [])) == (-7, -1)
    assert engine.batch_unregister_memory([room.at, room.at + 50]) == 0
    assert engine.batch_unregister_memory([room.at]) == -3
    assert (engine.register_memory(0, 10), engine.register_memory(room.at, 0)) == (-1, -1)


def test_managed_memory_is_registered(pair: tuple[TransferEngine, TransferEngine]) -> None:
    here, there = pair
    address, local = there.allocate_managed_buffer(1000), here.allocate_managed_buffer(1000)
    assert here.write_bytes_to_buffer(local, b"\xffbytes", 6) == 0  # type: ignore[arg-type]
    assert here.get_first_buffer_address(name(there)) == address
    assert here.transfer_sync_write(name(there), local, address, 6) == 0
    assert there.read_bytes_from_buffer(address, 6) == b"\xffbytes"
    assert (there.free_managed_buffer(address, 1000), there.free_managed_buffer(address, 1000)) == (0, -3)
    assert (here.allocate_managed_buffer(0), here.write_bytes_to_buffer(local, "x", 2)) == (0, -1)


def test_peer_that_is_not_there_is_a_code(pair: tuple[TransferEngine, TransferEngine]) -> None:
    engine, room = pair[0], Room(10)
    [port] = free_ports(1)
    for other in (f"127.0.0.1:{port}", "no port", "127.0.0.1:99999"):
        assert engine.transfer_sync_write(other, room.at, room.at, 10) == -1
        assert (engine.batch_transfer_async_write(other, [room.at], [room.at], [10]), engine.transfer_submit_write(other, 0, 0, 1)) == (
            0,
            0,
        )
        assert (engine.send_probe(other), engine.get_first_buffer_address(other)) == (-102, 0)
    assert engine.send_probe(name(pair[1])) == 0
    assert engine.get_first_buffer_address(name(pair[1])) == 0


def test_engine_has_the_port_of_its_name() -> None:
    [port] = free_ports(1)
    engine, second = TransferEngine(), TransferEngine()
    assert engine.initialize_ext(f"127.0.0.1:{port}", "127.0.0.1:2379", "rdma", "", "etcd") == 0
    assert second.initialize(f"127.0.0.1:{port}", P2P, "tcp", "") == 0
    assert engine.get_rpc_port() == port != second.get_rpc_port()
    assert engine.initialize("127.0.0.1", P2P, "tcp", "") == -1, "it is open already"
    engine._close()
    second._close()


def test_engine_that_is_not_open_returns_codes() -> None:
    engine, room = TransferEngine(), Room(10)
    assert engine.initialize("192.0.2.1", P2P, "tcp", "") == -1, "no address of this host"
    assert (engine.register_memory(room.at, 10), engine.allocate_managed_buffer(10), engine.get_rpc_port()) == (-1, 0, 0)
    assert (engine.transfer_sync_write("127.0.0.1:1", room.at, room.at, 1), engine.get_notifies(), engine.send_probe("x:1")) == (
        -1,
        [],
        -102,
    )
    assert engine.get_local_topology() == "{}"


def test_arguments_of_other_types_raise(pair: tuple[TransferEngine, TransferEngine]) -> None:
    engine = pair[0]
    for opcode in (0, "Write", None):
        with pytest.raises(TypeError):
            engine.transfer_sync("x:1", 1, 1, 1, opcode)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        engine.transfer_sync("x:1", 1, 1, 1, TransferOpcode.Read, "notify")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        engine.register_memory(-1, 1)


def test_rest_of_the_binding_is_there(pair: tuple[TransferEngine, TransferEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair[0]
    assert engine.get_engine() is engine
    assert engine.warmup_efa_segment("x") == 0
    assert "cpu:" in engine.get_local_topology("")
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "1")
    assert TransferEngine()._deadline_s == 5
