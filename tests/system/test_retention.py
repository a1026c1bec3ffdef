"""Retention hints, with real processes: what they keep, what an ended session frees, and where they travel."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.client.aio import AsyncClient
from kvstore.client.sync import Client
from kvstore.protocol.errors import Denied, InvalidArgument
from kvstore.protocol.retention import Retention
from tests.credentials import OPERATOR, tokens_file
from tests.system.history import value_of
from tests.system.running import STATUS_POLL_S, System, until
from tests.system.test_acks import tied
from tests.system.test_home_copies import SETTLE_S, put_slowly

BLOCK_BYTES = 64 << 10
SLOTS = 32
DRAM = str(SLOTS * BLOCK_BYTES)
KEEP = Retention(90)


def names(prefix: str, count: int) -> list[bytes]:
    return [b"%s-%d" % (prefix.encode(), number) for number in range(count)]


def put(client: Client, keys: list[bytes], retention: Retention | None = None) -> None:
    values = [value_of(key, 0, BLOCK_BYTES) for key in keys]
    assert client.put_batch(keys, values, retention=retention) == [True] * len(keys)


def flood(client: Client, count: int = 2 * SLOTS) -> None:
    """Put blocks that nobody reads, a few at a time."""
    keys = names("flood", count)
    for begin in range(0, count, 4):
        put(client, keys[begin : begin + 4])


def present(client: Client, keys: list[bytes]) -> int:
    return sum(client.exists_batch(keys))


@contextmanager
def running(folder: Path, *flags: str, nodes: int = 1, master_flags: tuple[str, ...] = ()) -> Iterator[System]:
    with System(folder) as system:
        system.start_master(0, *master_flags)
        for number in range(nodes):
            system.start_node(f"n{number}", "--dram", DRAM, *flags)
        yield system


@pytest.fixture
def small(tmp_path: Path) -> Iterator[System]:
    """A node of SLOTS blocks."""
    with running(tmp_path) as system:
        yield system


def test_blocks_of_high_priority_outlast_a_flood(small: System) -> None:
    kept, others = names("kept", SLOTS // 2), names("other", SLOTS // 2)
    with small.client(ack="node") as client:
        put(client, kept, KEEP)
        put(client, others)
        flood(client)
        assert present(client, kept) == len(kept)
        assert present(client, others) == 0
        assert client.stats().lost_retention_hints == 0
    until(lambda: small.node_status().counters["retained_blocks"] == len(kept), "they are counted", every_s=STATUS_POLL_S)


def test_a_priority_ends_after_its_ttl(small: System) -> None:
    kept = names("kept", SLOTS // 2)
    with small.client(ack="node") as client:
        put(client, kept, Retention(90, ttl_s=1.0))
        until(lambda: small.node_status().counters["retained_blocks"] == len(kept), "applied", every_s=STATUS_POLL_S)
        until(lambda: small.node_status().counters["retained_blocks"] == 0, "ended", every_s=STATUS_POLL_S)
        flood(client, 4 * SLOTS)
        assert present(client, kept) == 0


def test_a_session_that_ends_frees_its_blocks_first(small: System) -> None:
    own, shared, others = names("own", 8), names("shared", 8), names("other", 8)
    with small.client(ack="node") as client:
        put(client, own + shared, Retention(90, session="a"))
        put(client, others)
        assert None not in client.get_batch(shared, retention=Retention(session="b"))
        assert None not in client.get_batch(own), "a read without a session does not count"
        assert client.end_session("unknown") == 0
        assert client.end_session("a") == len(own)
        flood(client, SLOTS // 2)
        assert [present(client, keys) for keys in (own, shared, others)] == [0, len(shared), len(others)]


def test_a_later_hint_reaches_blocks_at_all_nodes(tmp_path: Path) -> None:
    keys = names("kept", 8)
    with running(tmp_path, nodes=2) as system:
        with tied(system, "n0") as first, tied(system, "n1") as second:
            put(first, keys[:4])
            put(second, keys[4:])
            first.flush()
            second.flush()
            assert first.retain([*keys, b"absent"], Retention(90, session="s")) == len(keys)
            for name in ("n0", "n1"):
                until(lambda name=name: system.node_status(name).counters["retained_blocks"] == 4, "applied", every_s=STATUS_POLL_S)  # type: ignore[misc]
            assert first.end_session("s") == len(keys)


def test_replicas_have_the_hints_of_their_blocks(tmp_path: Path) -> None:
    keys = names("kept", 8)
    with running(tmp_path, nodes=2) as system, system.client() as client:
        values = [value_of(key, 0, BLOCK_BYTES) for key in keys]
        assert client.put_batch(keys, values, replicas=2, ack="replicas", retention=Retention(90, session="s")) == [True] * len(keys)
        for name in ("n0", "n1"):
            until(lambda name=name: system.node_status(name).counters["retained_blocks"] == 8, "copied", every_s=STATUS_POLL_S)  # type: ignore[misc]
        assert client.end_session("s") == 2 * len(keys)


def test_home_copies_keep_their_hints(tmp_path: Path) -> None:
    kept = names("kept", SLOTS // 2)
    with running(tmp_path, nodes=1) as system:
        system.start_node("n1", "--dram", "32MiB")
        with tied(system, "n0") as client:
            put_slowly(system, client, names("first", SLOTS + 8))
            until(lambda: system.status().counters["home_copies"] > 0, "the master copies what the full node takes")
            for begin in range(0, len(kept), 4):
                put(client, kept[begin : begin + 4], KEEP)
                client.flush()
                time.sleep(SETTLE_S)
            system.await_settled()
            moved = sum("n1" in {place.node for place in places} for places in client.locate(kept))
            assert moved > 0
            until(lambda: system.node_status("n1").counters["retained_blocks"] == moved, f"{moved} hints moved", every_s=STATUS_POLL_S)


def test_hints_survive_demotion_to_nvme(tmp_path: Path) -> None:
    """Blocks of priority 0 leave DRAM first, and then NVMe, before older ones."""
    older, hinted = names("older", 48), names("hinted", 16)
    with running(tmp_path, "--nvme", f"{tmp_path / 'nvme'}:8MiB") as system, system.client(ack="node") as client:
        for keys, retention in ((older, None), (hinted, Retention(0)), *((names(f"newer-{n}", 28), None) for n in range(4))):
            put(client, keys, retention)
            client.flush()
            system.await_settled()
        assert present(client, hinted) == 0
        assert present(client, older) > len(older) // 2


def test_a_put_succeeds_although_its_hint_is_lost(small: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.retention.RETAIN_PUT", 7)  # which no node takes
    keys = names("kept", 4)
    with small.client(ack="node") as client:
        put(client, keys, KEEP)
        assert client.stats().lost_retention_hints == len(keys)
        assert present(client, keys) == len(keys)


def test_a_reader_cannot_lower_a_priority(tmp_path: Path) -> None:
    roles = "".join(f'[[tenants.red]]\ntoken = "{role}s"\nrole = "{role}"\n' for role in ("write", "read"))
    tokens = tokens_file(tmp_path, {"blue": "other"}, roles)
    keys = names("kept", SLOTS // 2)
    with running(tmp_path, master_flags=("--tokens", tokens)) as system:
        system.settings = replace(system.settings, tenant="red", token=OPERATOR)
        with system.client(tenant="red", token="writes") as writer:
            put(writer, keys)
            with system.client(tenant="red", token="reads") as reader:
                assert None not in reader.get_batch(keys, retention=Retention(0, session="s"))
                with pytest.raises(Denied, match="retention hints"):
                    reader.retain(keys, Retention(90))
                with pytest.raises(Denied, match="end sessions"):
                    reader.end_session("s")
            until(lambda: system.node_status().counters["retention_hints_ignored"] == len(keys), "they are counted")


def test_both_clients_send_hints_by_every_call(small: System) -> None:
    keys, value = names("k", 12), bytes(BLOCK_BYTES)
    with small.client(ack="node") as client:
        client.put(keys[0], value, retention=KEEP)
        assert client.put_batch_from(keys[1:3], [value] * 2, retention=KEEP) == [True] * 2
        client.put_batch(keys[3:9], [value] * 6)
        buffer = bytearray(BLOCK_BYTES)
        assert client.get(keys[3], retention=KEEP) == value
        assert client.get_into(keys[4], buffer, retention=KEEP) == BLOCK_BYTES
        assert client.get_batch_into(keys[5:6], [buffer], retention=KEEP) == [BLOCK_BYTES]
        assert client.get_each_into(keys[6:7], [buffer], retention=KEEP) == [BLOCK_BYTES]
        assert client.get_ranges_into(keys[7:8], [0], [buffer], retention=KEEP) == [BLOCK_BYTES]
        assert client.get(b"absent", retention=KEEP) is None
        with pytest.raises(InvalidArgument, match="retention is a Retention"):
            client.put(keys[8], value, retention=90)  # type: ignore[arg-type]
        settings = client._operations.settings

    async def run() -> None:
        async with AsyncClient(settings=settings) as other:
            await other.put(keys[9], value, retention=KEEP)
            assert await other.get_batch([keys[8]], retention=KEEP) == [value]
            assert await other.retain(keys[:3], Retention(95)) == 3
            assert await other.end_session("unknown") == 0

    asyncio.run(run())
    until(lambda: small.node_status().counters["retained_blocks"] == 10, "all are applied", every_s=STATUS_POLL_S)
