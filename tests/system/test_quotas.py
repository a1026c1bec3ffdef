"""Promises about quotas, with real processes: what one tenant may take, and that others do not notice when it wants more."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.client.control import Control
from kvstore.client.sync import Client
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import QuotaExceeded
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from tests.system.history import value_of
from tests.system.running import System, running_system, until

KIB = 1 << 10
VALUE_BYTES = 64 * KIB
QUOTA = '[tenants.red]\ndram_bytes = "1MiB"\n'
HELD_BY_QUOTA = 16
"""Values that red's quota has room for."""


def values(count: int, name: bytes = b"r") -> tuple[list[bytes], list[bytes]]:
    keys = [name + b"%d" % number for number in range(count)]
    return keys, [value_of(key, 0, VALUE_BYTES) for key in keys]


class Quotas:
    """The quotas file of a system, and its node's metrics of tenants."""

    def __init__(self, system: System, file: Path) -> None:
        self.system = system
        self.file = file

    def edit(self, text: str) -> None:
        """As an editor does: a new file in place of the old one."""
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.file)

    def use(self, tenant: str) -> pb.TenantUse:
        found = {use.tenant: use for use in self.system.node_status().tenants}
        return found.get(tenant, pb.TenantUse())

    def tenant(self, name: str) -> Client:
        return self.system.client(tenant=name)


@pytest.fixture
def quotas(tmp_path: Path) -> Iterator[Quotas]:
    file = tmp_path / "quotas.toml"
    file.write_text(QUOTA)
    with running_system(tmp_path, "--dram 16MiB --policy lru", master=f"--quotas {file} --tokens-check-interval-s 0.05") as system:
        yield Quotas(system, file)


@pytest.mark.promise("tenant-quotas")
def test_tenant_at_its_quota_takes_nothing_from_others(quotas: Quotas) -> None:
    keys, wanted = values(8, b"b")
    with quotas.tenant("red") as red, quotas.tenant("blue") as blue:
        blue.put_batch(keys, wanted)
        many, contents = values(4 * HELD_BY_QUOTA)
        for key, value in zip(many, contents, strict=True):
            red.put(key, value)
        found = red.get_batch(many)
        assert [value for value in found if value is not None] == contents[-HELD_BY_QUOTA:], "the coldest of its own have left"
        assert blue.get_batch(keys) == wanted
        until(lambda: quotas.use("red").dram_bytes == HELD_BY_QUOTA * VALUE_BYTES, "red's use told to the master")
        assert quotas.use("blue").dram_bytes == 8 * VALUE_BYTES


@pytest.mark.promise("tenant-quotas")
def test_what_the_file_says_now_holds_without_a_restart(quotas: Quotas) -> None:
    keys, wanted = values(HELD_BY_QUOTA)
    with quotas.tenant("red") as red:
        red.put_batch(keys, wanted)
        quotas.edit('[tenants.red]\ndram_bytes = "256KiB"\n')
        until(lambda: red.exists_batch(keys).count(True) == 4, "the surplus gone")
        assert [value for value in red.get_batch(keys) if value is not None] == wanted[-4:], "the coldest have left"
        quotas.edit('[tenants.red]\ndram_bytes = "one"\n')
        until(lambda: any("quotas reload quotas file, failed: " in line for line in quotas.system.logs), "the bad file in the master's log")
        assert red.put(b"one more", wanted[0])
        assert red.exists_batch(keys).count(True) == 3
        quotas.edit("")

        def has_room_for_all() -> bool:
            red.put_batch(keys, wanted)
            return all(red.exists_batch(keys))

        until(has_room_for_all, "room for all")


@pytest.mark.promise("tenant-quotas")
def test_a_waiting_put_of_one_tenant_does_not_delay_anothers(quotas: Quotas) -> None:
    """Red's blocks are pinned: nothing of its own can leave for what it puts next, until its deadline."""
    keys, wanted = values(HELD_BY_QUOTA)
    with quotas.tenant("red") as red, quotas.tenant("blue") as blue, ThreadPoolExecutor(1) as aside:
        red.put_batch(keys, wanted)
        assert all(red.pin(keys))
        with quotas.system.client(tenant="red", deadline_s=5.0) as late:
            waiting = aside.submit(late.put, b"one more", wanted[0])
            quotas.system.await_counters(waiting=1)
            assert all(blue.put_batch(keys, wanted))
            assert blue.get_batch(keys) == wanted
            with pytest.raises(QuotaExceeded, match=r"tenant 'red' has used its quota on this node, 1 MiB in DRAM"):
                waiting.result()


@pytest.mark.promise("tenant-quotas")
def test_tenant_of_many_sizes_stays_within_its_slabs(tmp_path: Path) -> None:
    """Each size has a slab of its own, and red's others leave for the next one's. Blue's stay, in as many slabs as they need."""
    file = tmp_path / "quotas.toml"
    file.write_text("[tenants.red]\ndram_slabs = 4\n")
    keys, wanted = values(HELD_BY_QUOTA, b"b")
    with running_system(tmp_path, "--dram 4MiB --policy lru", master=f"--quotas {file}") as system:
        quotas = Quotas(system, file)
        with system.client(tenant="red") as red, system.client(tenant="blue") as blue:
            blue.put_batch(keys, wanted)
            many = [b"r%d" % number for number in range(12)]
            contents = [value_of(key, 0, (number + 1) * KIB) for number, key in enumerate(many)]
            for key, value in zip(many, contents, strict=True):
                red.put(key, value)
            assert red.get_batch(many) == [None] * 8 + contents[-4:]
            assert blue.get_batch(keys) == wanted
            until(lambda: quotas.use("red").dram_slabs == 4, "red's slabs told to the master")
            assert all(red.pin(many[-4:]))
            with system.client(tenant="red", deadline_s=1.0) as late, pytest.raises(QuotaExceeded, match=r"4 slabs of DRAM \(dram_slabs\)"):
                late.put(b"one more", bytes(20 * KIB))


@pytest.mark.promise("tenant-quotas")
def test_pins_and_reservations_beyond_the_quota_are_refused(quotas: Quotas) -> None:
    keys, wanted = values(4)
    quotas.edit("[tenants.red]\npins = 2\nreservations = 0\n")
    with quotas.tenant("red") as red, quotas.tenant("blue") as blue:
        for client in (red, blue):
            assert all(client.put_batch(keys, wanted)), "the node that has the values asks the master for these"

        def are_refused() -> bool:
            try:
                red.pin(keys)
            except QuotaExceeded:
                return True
            red.unpin(keys)
            return False

        until(are_refused, "pins held to the quota")
        with pytest.raises(QuotaExceeded, match=r"red' has 0 blocks pinned; 4 more exceed its quota of 2 \(pins\)"):
            red.pin(keys)
        assert all(red.pin(keys[:2]))
        assert all(blue.pin(keys))
    with quotas.system.remote_client(tenant="red") as far, pytest.raises(QuotaExceeded, match=r"its quota of 0 \(reservations\)"):
        far.put(b"far", wanted[0])


@pytest.mark.promise("tenant-quotas")
def test_connections_beyond_quota_are_refused_by_daemons(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text("[tenants.red]\nconnections = 1\n")
    with running_system(tmp_path, "--dram 16MiB", master=f"--quotas {file}") as system:
        node = Address(unix=system.nodes["n0"].facts("serving", deadline_s=60)["unix"])
        for address in (parse_address(system.address), node):
            red, blue = Hello(ROLE_CLIENT, "red"), Hello(ROLE_CLIENT, "blue")
            first = Channel.open(address, red, Deadline(60))
            with pytest.raises(QuotaExceeded, match=r"tenant 'red' has 1 connections here"):
                Channel.open(address, red, Deadline(60))
            Channel.open(address, blue, Deadline(60)).close()
            first.close()

            def is_let_in(address: Address = address, red: Hello = red) -> bool:
                try:
                    Channel.open(address, red, Deadline(60)).close()
                except QuotaExceeded:
                    return False
                return True

            until(is_let_in, "a place for another connection")


def holds(system: System, client: Client, keys: list[bytes], count: int) -> None:
    """Put the keys repeatedly until exactly `count` of them stay."""
    contents = [value_of(key, 0, VALUE_BYTES) for key in keys]

    def is_so() -> bool:
        client.put_batch(keys, contents)
        return client.exists_batch(keys).count(True) == count

    until(is_so, f"{count} of the tenant's values")


@pytest.mark.promise("tenant-quotas")
def test_operator_quota_overrides_file_until_cleared(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text(QUOTA)
    flags = ("--quotas", str(file), "--tokens-check-interval-s", "0.05")
    keys, wanted = values(HELD_BY_QUOTA)
    with System(tmp_path, f"lmdb:{tmp_path / 'catalog'}") as system:
        system.start_master(0, *flags)
        system.start_node("n0", "--dram", "16MiB", "--policy", "lru")
        with system.client(tenant="red") as red:
            assert all(red.put_batch(keys, wanted))
            with Control.find(system.settings) as control:
                control.set_quota("red", {"dram_bytes": 4 * VALUE_BYTES})
            until(lambda: red.exists_batch(keys).count(True) == 4, "the surplus gone")
            system.masters[0].kill()
            system.start_master(0, *flags)
            system.await_alive("n0")
            holds(system, red, keys, 4)
            file.write_text('[tenants.red]\ndram_bytes = "768KiB"\n')
            with Control.find(system.settings) as control:
                until(lambda: control.status().quotas.tenants["red"].dram_bytes == 4 * VALUE_BYTES, "the operator's above the file's")
                control.clear_quota("red")
            holds(system, red, keys, 12)


@pytest.mark.promise("tenant-quotas")
def test_operator_quota_holds_after_a_failover(tmp_path: Path, etcd_url: str) -> None:
    with System(tmp_path, f"{etcd_url}/{uuid.uuid4()}", masters=2) as system:
        system.start_masters("--lease-ttl-s", "5")
        system.start_node("n0", "--dram", "16MiB", "--policy", "lru")
        keys, _wanted = values(HELD_BY_QUOTA)
        with Control.find(system.settings) as control:
            control.set_quota("red", {"dram_bytes": 4 * VALUE_BYTES, "pins": 1})
        system.masters[0].kill()
        system.await_alive("n0")
        assert system.status().quota_origins["red"].operator == ["dram_bytes", "pins"]
        with system.client(tenant="red") as red:
            holds(system, red, keys, 4)
            with pytest.raises(QuotaExceeded, match=r"its quota of 1 \(pins\)"):
                red.pin([key for key, is_there in zip(keys, red.exists_batch(keys), strict=True) if is_there])
