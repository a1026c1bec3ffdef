"""Tickets in a cluster of real processes: clients go on through all that makes nodes ask for others, and end with their tokens."""

import asyncio
import dataclasses
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore.client.aio import AsyncClient
from kvstore.client.sync import Client
from kvstore.protocol.errors import InvalidTicket, KVStoreError, Unauthorized, Unavailable
from kvstore.protocol.node_messages import ReadBlocks, ReadBlocksReply
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import eventually
from tests.credentials import OPERATOR, tokens_file, tokens_text
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, System
from tests.tickets import hello_to_node, node_table

TOKENS = {"red": "red's secret", "blue": "blue's secret"}
KEYS = [b"block-%d" % number for number in range(20)]
VALUES = [value_of(key, 0, 3000) for key in KEYS]


def with_tokens(folder: Path, catalog: str = "memory:", **options: int) -> System:
    tokens_file(folder, TOKENS)
    system = System(folder, catalog, **options)
    system.settings = dataclasses.replace(system.settings, token=OPERATOR)
    return system


def start_master(system: System, index: int = 0, *flags: str) -> None:
    system.start_master(index, "--tokens", str(system.folder / "tokens.toml"), "--tokens-check-interval-s", "0.05", *flags)


@contextmanager
def running(folder: Path, *node_flags: str, master_flags: Sequence[str] = ()) -> Iterator[System]:
    """A master with TOKENS, and a node."""
    with with_tokens(folder) as system:
        start_master(system, 0, *master_flags)
        system.start_node("n0", "--dram", "16MiB", *node_flags)
        yield system


def as_tenant(system: System, tenant: str = "red") -> Client:
    return system.client(tenant=tenant, token=TOKENS[tenant])


@pytest.mark.promise("authentication")
def test_client_survives_node_restart_with_another_key(tmp_path: Path) -> None:
    """Its open connections, its reader slots in shared memory and its tickets are all invalid after the restart."""
    with running(tmp_path, "--nvme", f"{tmp_path / 'nvme'}:64MiB") as system:
        with as_tenant(system) as near, system.remote_client(tenant="red", token=TOKENS["red"]) as far:
            near.put_batch(KEYS, VALUES)
            assert near.get_batch(KEYS) == far.get_batch(KEYS) == VALUES
            system.nodes["n0"].stop()
            system.start_node("n0")
            for client in (near, far):
                eventually(lambda client=client: client.get_batch(KEYS) == VALUES, "what NVMe had is read again")  # type: ignore[misc]
                assert client.put(b"after " + str(id(client)).encode(), b"x")


@pytest.mark.promise("authentication")
def test_tickets_of_a_moment_are_renewed_and_nothing_is_refused(tmp_path: Path) -> None:
    """By blocking and asynchronous clients that open a connection for each call, for several lives of a ticket."""
    with running(tmp_path, master_flags=("--ticket-ttl-s", "1", "--ticket-key-ttl-s", "1")) as system:
        settings = dataclasses.replace(system.settings, tenant="red", token=TOKENS["red"], idle_ttl_s=0.001, use_index=False)

        seen: dict[str, set[bytes]] = {"sync": set(), "async": set()}
        with system.client(settings=settings) as client:
            client.put_batch(KEYS, VALUES)

            def again() -> bool:
                assert client.get_batch(KEYS) == VALUES
                for node in client._operations.resources.daemons.nodes._nodes.values():
                    assert node.route.hello is not None
                    seen["sync"].add(node.route.hello.ticket)
                return len(seen["sync"]) >= 4

            eventually(again, "four tickets")

        async def aio() -> None:
            async with AsyncClient(settings=settings) as client:
                while len(seen["async"]) < 4:
                    assert await client.get_batch(KEYS) == VALUES
                    for node in client._operations.resources.daemons.nodes._nodes.values():
                        assert node.route.hello is not None
                        seen["async"].add(node.route.hello.ticket)

        asyncio.run(asyncio.wait_for(aio(), DEADLINE_S))


@pytest.mark.promise("authentication")
def test_revoked_token_ends_its_node_sessions_only(tmp_path: Path) -> None:
    with running(tmp_path) as system:
        address = parse_address(node_table(system.address, "red", TOKENS["red"]).tcp[0])
        hellos = {tenant: hello_to_node(system.address, tenant, TOKENS[tenant]) for tenant in TOKENS}
        red, blue = (Channel.open(address, hellos[tenant], Deadline(DEADLINE_S)) for tenant in ("red", "blue"))
        with closing(red), closing(blue), as_tenant(system) as client, as_tenant(system, "blue") as other:
            assert client.put(b"k", b"value")
            assert client.get(b"k") == b"value"
            assert other.put(b"k", b"blue's")
            (system.folder / "new.toml").write_text(tokens_text({"red": "another secret", "blue": TOKENS["blue"]}))
            os.replace(system.folder / "new.toml", system.folder / "tokens.toml")
            eventually(red.is_closed_by_peer, "the node hangs up on who showed a ticket of that token")
            with pytest.raises(InvalidTicket):
                Channel.open(address, hellos["red"], Deadline(DEADLINE_S))

            def is_out() -> bool:
                """Return whether reads fail, also local ones, which send no request: the reader slots are gone."""
                try:
                    return client.get(b"k") is None
                except Unauthorized:
                    return True

            eventually(is_out, "the client gets nothing any more")
            with pytest.raises(Unauthorized):
                client.put(b"new", b"value")
            assert not blue.is_closed_by_peer()
            assert blue.call(ReadBlocks([b"k"], [0], 100, 0), ReadBlocksReply, Deadline(DEADLINE_S)).sizes[0] == len(b"blue's")
            assert other.get(b"k") == b"blue's"
        with system.client(tenant="red", token="another secret") as again:
            assert again.get(b"k") == b"value"


@pytest.mark.promise("authentication")
def test_failover_keeps_sessions_and_old_tickets_valid(tmp_path: Path, etcd_url: str) -> None:
    with with_tokens(tmp_path, f"{etcd_url}/{uuid.uuid4()}", masters=2) as system:
        for index in range(2):
            start_master(system, index, "--lease-ttl-s", "5")
        system.start_node("n0", "--dram", "16MiB")
        first = system.address.partition(",")[0]
        hello = hello_to_node(first, "red", TOKENS["red"])
        address = parse_address(node_table(first, "red", TOKENS["red"]).tcp[0])
        with closing(Channel.open(address, hello, Deadline(DEADLINE_S))) as session, as_tenant(system) as client:
            client.put_batch(KEYS, VALUES)
            system.masters[0].kill()
            assert client.get_batch(KEYS) == VALUES, "while nobody owns the catalog"
            with closing(Channel.open(address, hello, Deadline(DEADLINE_S))):
                pass
            eventually(lambda: _puts(client), "the second owns the catalog, and the node has found it")
            assert client.get_batch(KEYS) == VALUES
            assert not session.is_closed_by_peer()
            with closing(Channel.open(address, hello, Deadline(DEADLINE_S))):
                pass
            with system.client(tenant="red", token=TOKENS["red"]) as newcomer:
                assert newcomer.get_batch(KEYS) == VALUES


def _puts(client: Client) -> bool:
    try:
        client.put(b"after the takeover", b"x")
    except KVStoreError:
        return False
    return True


@pytest.mark.promise("authentication")
def test_sessions_without_master_end_after_grace_time(tmp_path: Path) -> None:
    with running(tmp_path, "--ticket-grace-s", "0.5") as system:
        hello = hello_to_node(system.address, "red", TOKENS["red"])
        address = parse_address(node_table(system.address, "red", TOKENS["red"]).tcp[0])
        with closing(Channel.open(address, hello, Deadline(DEADLINE_S))) as session:
            system.masters[0].kill()
            eventually(session.is_closed_by_peer, "the node hangs up")
            with pytest.raises(Unavailable, match=r"has had no link to its master for 0\.5 s"):
                Channel.open(address, hello, Deadline(DEADLINE_S))
