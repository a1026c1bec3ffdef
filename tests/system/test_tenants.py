"""Two tenants with tokens on one cluster: neither can tell that the other is there."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.client.control import Control
from kvstore.client.sync import Client
from kvstore.protocol.errors import Unauthorized
from kvstore.protocol.node_messages import MAPPED, MISS, MapSlabs, ReadBlocks, ReadBlocksReply
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from tests.credentials import OPERATOR, tokens_file
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, System, running_system
from tests.tickets import hello_to_node

TOKENS = {"red": "red's secret", "blue": "blue's secret"}
KEYS = [b"small", b"large"]
SIZES = {"red": (1000, 300_000), "blue": (2000, 200_000)}


def values(tenant: str) -> list[bytes]:
    return [value_of(tenant.encode() + key, 0, size) for key, size in zip(KEYS, SIZES[tenant], strict=True)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Red has put its blocks."""
    folder = tmp_path_factory.mktemp("tenants")
    tokens = tokens_file(folder, TOKENS)
    with System(folder) as started:
        started.settings = dataclasses.replace(started.settings, tenant="red", token=OPERATOR)
        started.start_master(0, "--tokens", tokens)
        started.start_node("n0", "--dram", "16MiB")
        with as_tenant(started, "red") as red:
            assert red.put_batch(KEYS, values("red"), namespace="secret") == [True, True]
        yield started


def as_tenant(system: System, tenant: str) -> Client:
    return system.client(tenant=tenant, token=TOKENS[tenant])


@pytest.mark.promise("tenant-isolation")
def test_the_other_tenants_blocks_are_not_there(system: System) -> None:
    with as_tenant(system, "blue") as blue:
        assert blue.exists_batch(KEYS) == [False, False]
        assert blue.match_prefix(KEYS) == 0
        assert blue.locate(KEYS) == [[], []]
        assert blue.get_batch(KEYS) == [None, None]
        with blue.view(KEYS[1]) as memory:
            assert memory is None
        assert blue.pin(KEYS) == [False, False]
        assert blue.remove(KEYS, force=True) == 0
        with Control.find(dataclasses.replace(system.settings, tenant="blue", token=TOKENS["blue"])) as control:
            assert list(control.keys()) == []
            assert list(control.keys("secret")) == []
    with as_tenant(system, "red") as red:
        assert red.get_batch(KEYS) == values("red")


@pytest.mark.promise("tenant-isolation")
def test_the_same_keys_are_other_blocks(system: System) -> None:
    with as_tenant(system, "red") as red, as_tenant(system, "blue") as blue:
        assert blue.put_batch(KEYS, values("blue")) == [True, True]
        assert blue.get_batch(KEYS) == values("blue")
        assert red.get_batch(KEYS) == values("red")
        assert blue.remove(KEYS) == 2
        assert red.exists_batch(KEYS) == [True, True]


@pytest.mark.promise("tenant-isolation")
def test_tenants_outnumbering_slabs_keep_their_blocks(tmp_path: Path) -> None:
    """64 slabs of 64 KiB, one tenant each: the first of a tenant is small."""
    tenants = [f"tenant-{number}" for number in range(100)]
    with running_system(tmp_path, "--dram 4MiB") as system:
        for tenant in tenants:
            with system.client(tenant=tenant) as client:
                assert client.put(b"only", value_of(tenant.encode(), 0, 1024))
        for tenant in tenants:
            with system.client(tenant=tenant) as client:
                assert client.get(b"only") == value_of(tenant.encode(), 0, 1024)


def node_unix(system: System) -> Address:
    return Address(unix=system.nodes["n0"].facts("serving", deadline_s=DEADLINE_S)["unix"])


def node_tcp(system: System) -> Address:
    return parse_address(system.node_status().tcp)


@pytest.mark.promise("tenant-isolation")
def test_node_gives_no_tenant_bytes_or_slabs_of_another(system: System) -> None:
    deadline = Deadline(DEADLINE_S)
    red, blue = (
        Channel.open(node_unix(system), hello_to_node(system.address, tenant, TOKENS[tenant]), deadline) for tenant in ("red", "blue")
    )
    with closing(red), closing(blue):
        there = red.call(ReadBlocks(KEYS, [0, 0], 0, 1000), ReadBlocksReply, deadline)
        assert list(there.statuses) == [MAPPED, MAPPED]
        with as_tenant(system, "red") as client:
            generations = [found[0].generation for found in client.locate(KEYS)]
        for asked in (generations, [0, 0]):
            blocks = blue.call(ReadBlocks(KEYS, asked, 0, 1000), ReadBlocksReply, deadline)
            assert (list(blocks.statuses), list(blocks.sizes)) == ([MISS, MISS], [0, 0])
        for writable in (0, 1):
            answer, fds = blue.call_for_fds(MapSlabs(there.slabs, writable), deadline)
            assert (list(answer.sizes), fds) == ([0, 0], [])


@pytest.mark.promise("authentication")
@pytest.mark.parametrize(("tenant", "token"), [("red", TOKENS["blue"]), ("red", ""), ("green", "any"), ("", "")])
def test_a_wrong_token_is_refused_by_master_and_node_alike(system: System, tenant: str, token: str) -> None:
    with system.client(tenant=tenant, token=token) as client, pytest.raises(Unauthorized):
        client.get(KEYS[0])
    hello, said = Hello(ROLE_CLIENT, tenant, token), []
    for address in (parse_address(system.address), node_unix(system), node_tcp(system)):
        with pytest.raises(Unauthorized) as refusal:
            Channel.open(address, hello, Deadline(DEADLINE_S))
        said.append(str(refusal.value))
    assert not any(secret in text for text in said for secret in TOKENS.values())
    with Control.find(system.settings) as control:
        assert sorted(stored.key for stored in control.keys("secret")) == sorted(KEYS)
