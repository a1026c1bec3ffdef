"""Behaviour of both clients against real daemons: a test class that test_sync.py and test_aio.py inherit.

Tests of values run three times: on the node's host through shared memory; as a remote client with messages, and the
transfer engine for large values; and as a remote client with the engine for all but the smallest values.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client.config import ClientSettings, resolve_settings
from kvstore.client.holds import new_hold
from kvstore.protocol.errors import Closed, ConfigError, Full, InvalidArgument, LeaseExpired, Unavailable
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster

SIZES = (1, 1 << 10, (1 << 10) + 1, 64 << 10, (64 << 10) + 1, (1 << 20) + 3)
"""On both sides of the sizes from which values go through shared memory."""
_serial = itertools.count()

MakeClient = Callable[..., AbstractContextManager[Any]]
"""Takes the client's arguments; the client in the context has its calls, blocking."""


def fresh_keys(count: int) -> list[bytes]:
    """Keys that no other test uses."""
    return [b"key %d" % next(_serial) for _ in range(count)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("c")) as started:
        started.start_node("--dram", "128MiB")
        yield started


@pytest.fixture
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On the node's host, unless EVERYWHERE says otherwise."""
    where = str(getattr(request, "param", "here"))
    if where != "here":
        monkeypatch.setattr("kvstore.client.operations.is_local_socket", lambda unix, host_id: False)
    if where == "by engine":
        monkeypatch.setattr(
            "kvstore.client.base_client.resolve_settings",
            lambda *given, **named: replace(resolve_settings(*given, **named), engine_min_bytes=1),
        )
    return where


EVERYWHERE = pytest.mark.parametrize("where", ["here", "elsewhere", "by engine"], indirect=True)
"""Of tests whose values go another way then."""


@pytest.fixture
def client(running: Cluster, make_client: MakeClient, where: str) -> Iterator[Any]:
    with make_client(running.address) as client:
        yield client


class ClientBehaviour:
    def test_the_cluster_is_looked_at_through_the_client(self, client: Any, running: Cluster) -> None:
        keys, space = fresh_keys(3), f"space {next(_serial)}"
        client.put_batch(keys, [b"v"] * 3, namespace=space, ack="cluster")
        assert 0 < client.ping() < 60
        assert sorted(client.keys(space)) == sorted(keys)
        assert len(client.keys(limit=2)) == 2
        assert set(keys) <= set(client.keys())
        (node,) = client.status()["nodes"]
        assert (node["name"], node["state"]) == ("n0", "alive")
        assert client.remove_all(space) == 3
        assert client.keys(space) == []
        with pytest.raises(InvalidArgument):
            client.ping(deadline_s=0)

    def test_the_master_is_found_as_the_command_line_finds_it(
        self, running: Cluster, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVSTORE_MASTER", running.address)
        with make_client() as client:
            assert client.exists(b"nowhere") is False
        with make_client(settings=ClientSettings(master="127.0.0.1:1")) as client, pytest.raises(Unavailable):
            client.ping(deadline_s=1)
        monkeypatch.setenv("KVSTORE_MASTR", running.address)
        with pytest.raises(ConfigError, match="did you mean KVSTORE_MASTER"), make_client():
            pass

    def test_settings_give_master_tenant_token_and_deadline(self, running: Cluster, make_client: MakeClient) -> None:
        chosen = ClientSettings(master=running.address, tenant="red", token="of red", deadline_s=2.0)
        [key] = fresh_keys(1)
        with make_client(settings=chosen) as red, make_client(running.address, settings=ClientSettings(tenant="blue")) as blue:
            assert red.put(key, b"red", deadline_s=60.0)
            assert red.get(key, deadline_s=60.0) == b"red"
            assert blue.get(key, deadline_s=60.0) is None
            assert (red.settings.deadline_s, red.settings.token) == (2.0, "of red")
            assert (blue.settings.deadline_s, blue.settings.token) == (10.0, "")

    def test_an_argument_that_differs_from_settings_is_refused(self, make_client: MakeClient) -> None:
        with (
            pytest.raises(InvalidArgument, match="deadline_s is given twice"),
            make_client(deadline_s=10.0, settings=ClientSettings(deadline_s=2.0)),
        ):
            pass

    @pytest.mark.promise("get-exact-bytes")
    @EVERYWHERE
    def test_what_was_put_is_got_whatever_its_size(self, client: Any) -> None:
        keys, values = fresh_keys(len(SIZES)), [os.urandom(size) for size in SIZES]
        for key, value in zip(keys, values, strict=True):
            assert client.get(key) is None
            assert client.put(key, value) is True
            assert client.put(key, b"something else") is False
            assert client.get(key) == value
        assert client.get_batch(keys) == values

    def test_a_batch_stores_each_key_once(self, client: Any) -> None:
        a, b, c = fresh_keys(3)
        assert client.put(b, b"before")
        assert client.put_batch([a, b, c, a], [b"1" * 100_000, b"2", b"3", b"4"]) == [True, False, True, False]
        assert client.get_batch([c, b, a, b"nowhere"]) == [b"3", b"before", b"1" * 100_000, None]
        assert client.put_batch([], []) == []
        assert client.get_batch([]) == []

    def test_another_client_reads_what_this_one_put(self, client: Any, running: Cluster, make_client: MakeClient) -> None:
        keys = fresh_keys(2)
        values = [os.urandom(10), os.urandom(200_000)]
        client.put_batch(keys, values, ack="cluster")
        with make_client(running.address) as other:
            assert other.get_batch(keys) == values
            assert other.stats().hits == 2

    @EVERYWHERE
    def test_values_are_read_into_the_callers_buffers(self, client: Any) -> None:
        keys = fresh_keys(3)
        values = [os.urandom(100), os.urandom(100_000)]
        client.put_batch(keys[:2], values)
        buffers: list[Any] = [bytearray(200), np.zeros(100_000, np.uint8), bytearray(1)]
        assert client.get_batch_into(keys, buffers) == [100, 100_000, None]
        assert bytes(buffers[0][:100]) == values[0]
        assert bytes(buffers[1]) == values[1]
        assert client.get_into(keys[0], buffers[0]) == 100
        assert client.get_into(keys[2], buffers[0]) is None

    @EVERYWHERE
    def test_a_buffer_too_small_is_refused_and_the_client_goes_on(self, client: Any) -> None:
        keys = fresh_keys(2)
        client.put_batch(keys, [b"x" * 100_000, b"y" * 10])
        for key, size in zip(keys, (100_000, 10), strict=True):
            with pytest.raises(InvalidArgument, match=f"has {size - 1} bytes, its value has {size}"):
                client.get_into(key, bytearray(size - 1))
        assert client.get_batch(keys) == [b"x" * 100_000, b"y" * 10]

    @EVERYWHERE
    def test_arrays_and_tensors_are_values_and_destinations(self, client: Any) -> None:
        keys = fresh_keys(2)
        array = np.random.default_rng(1).normal(size=(64, 1024)).astype(np.float32)
        tensor = torch.arange(100_000, dtype=torch.bfloat16)
        assert client.put_batch(keys, [array, tensor]) == [True, True]
        into = [np.empty_like(array), torch.empty_like(tensor)]
        assert client.get_batch_into(keys, into) == [array.nbytes, 200_000]
        assert np.array_equal(into[0], array)
        assert torch.equal(into[1], tensor)

    @EVERYWHERE
    def test_a_view_is_the_value_read_only(self, client: Any) -> None:
        for size in SIZES:
            [key] = fresh_keys(1)
            value = os.urandom(size)
            client.put(key, value)
            with client.view(key) as memory:
                assert memory == value
                assert memory.readonly
            with pytest.raises(ValueError, match="released"):
                bytes(memory)

    def test_a_view_of_nothing_is_none(self, client: Any) -> None:
        with client.view(b"nowhere") as memory:
            assert memory is None

    def test_several_views_are_open_at_once(self, client: Any) -> None:
        keys = fresh_keys(3)
        client.put_batch(keys, [b"%d" % i * 50_000 for i in range(3)])
        with client.view(keys[0]) as a, client.view(keys[1]) as b, client.view(keys[2]) as c:
            assert (a[0], b[0], c[0]) == (ord("0"), ord("1"), ord("2"))

    @EVERYWHERE
    def test_local_view_past_its_lease_raises(self, running: Cluster, make_client: MakeClient, where: str) -> None:
        with make_client(running.address, settings=ClientSettings(view_lease_s=0.001, use_index=False)) as client:
            [key] = fresh_keys(1)
            client.put(key, b"x" * 100_000)
            if where != "here":
                with client.view(key) as memory:
                    assert len(memory) == 100_000
                return
            with pytest.raises(LeaseExpired), client.view(key):
                until_ns = time.monotonic_ns() + 1_500_000
                while time.monotonic_ns() < until_ns:
                    pass
            assert client.get(key) == b"x" * 100_000

    @EVERYWHERE
    def test_existence_and_prefixes_are_told(self, client: Any) -> None:
        a, b, c, d = fresh_keys(4)
        client.put_batch([a, b, d], [b"1", b"2", b"3"], parents=[None, a, None])
        assert (client.exists(a), client.exists(c)) == (True, False)
        assert client.exists_batch([a, b, c, d]) == [True, True, False, True]
        assert client.match_prefix([a, b, c, d]) == 2

    @EVERYWHERE
    def test_what_a_lookup_holds_stays_until_it_is_released(self, client: Any, running: Cluster) -> None:
        a, b, c, d = fresh_keys(4)
        client.put_batch([a, b, d], [b"1", b"2", b"3"])
        hold = new_hold(30)
        assert client.match_prefix([a, b, c, d], hold=hold) == 2
        assert client.remove([a, b]) == 0
        assert client.exists_batch([c, d], hold=hold) == [False, True]
        assert (client.exists(d, hold=hold), client.exists(c, hold=hold)) == (True, False)
        assert client.remove([d]) == 0
        assert client.remove([b], force=True) == 1
        client.release(hold)
        client.release(hold)
        eventually(lambda: client.remove([a, d]) == 2, "the node to know that the hold is over")
        assert client.match_prefix([a], hold=hold) == 0
        assert client.stats().held_blocks >= 3

    def test_a_prefetch_asks_the_node_of_this_host(self, client: Any) -> None:
        a, b = fresh_keys(2)
        client.put(a, b"value")
        assert client.prefetch([]) == 0
        assert client.prefetch([a], "local") == client.prefetch([a], to="dram") == 0, "it is in DRAM"
        assert client.prefetch([a, b]) == 1, "nobody knows yet that the other is nowhere"
        assert client.get_batch([a, b]) == [b"value", None]

    @pytest.mark.parametrize("where", ["elsewhere"], indirect=True)
    def test_a_prefetch_without_a_local_node_is_unavailable(self, client: Any) -> None:
        with pytest.raises(Unavailable, match="no storage node is on this host"):
            client.prefetch(fresh_keys(1))

    def test_bad_prefetches_are_refused(self, client: Any) -> None:
        for to in ("hbm", "", 1, None, ["dram"]):
            with pytest.raises(InvalidArgument, match="to is 'local' or 'dram', not"):
                client.prefetch([b"a"], to)
        with pytest.raises(InvalidArgument, match="a prefetch takes at most 16384 keys, not 16385"):
            client.prefetch([b"a"] * 16385)
        for keys in (b"a", [b""], [b"k" * 256], {b"a"}, ["a"]):
            with pytest.raises(InvalidArgument, match="key"):
                client.prefetch(keys)
        with pytest.raises(InvalidArgument, match="deadline_s"):
            client.prefetch([b"a"], deadline_s=0)

    def test_blocks_are_located(self, client: Any) -> None:
        a, b = fresh_keys(2)
        client.put(a, b"value")
        [[location], none] = client.locate([a, b])
        assert none == []
        assert (location.node, location.tiers, location.size_bytes) == ("n0", ("dram",), 5)

    @EVERYWHERE
    def test_removed_blocks_are_gone_at_once(self, client: Any) -> None:
        a, b = fresh_keys(2)
        client.put(a, b"value")
        assert client.remove([a, b]) == 1
        assert client.get(a) is None
        assert client.put(a, b"new value") is True
        assert client.get(a) == b"new value"

    def test_pins_tell_what_is_there(self, client: Any) -> None:
        a, b = fresh_keys(2)
        client.put(a, b"value")
        assert client.pin([a, b]) == [True, False]
        assert client.remove([a]) == 0
        assert client.unpin([a, b]) == [True, False]
        assert client.remove([a]) == 1

    def test_a_pin_with_a_time_ends_by_itself(self, client: Any) -> None:
        a, b, c = fresh_keys(3)
        client.put_batch([a, b, c], [b"1", b"2", b"3"])
        client.pin([c])
        assert client.pin([a, *fresh_keys(1)], ttl_s=3600) == [True, False]
        assert client.pin([b, c], ttl_s=0.001)[1]  # the first may have ended by the time that it is answered
        while not client.remove([b]):
            pass
        assert client.remove([a, c]) == 0
        assert client.unpin([a, c]) == [True, True]
        assert client.remove([a, c]) == 2
        for ttl_s in (0, -1, 10**9, "1"):
            with pytest.raises(InvalidArgument, match="ttl_s"):
                client.pin([a], ttl_s=ttl_s)

    def test_blocks_are_removed_by_namespace_and_by_pattern(self, client: Any) -> None:
        serial, keys = next(_serial), []
        for i in range(6):
            keys.append(b"matching %d %d \xff" % (serial, i))
            client.put(keys[-1], b"value", namespace=f"{serial} {i % 2}")
        client.pin(keys[:1])
        assert client.remove_matching(namespace=f"{serial} 2") == 0
        assert client.remove_matching(namespace=f"{serial} 1", pattern=f"matching {serial} [13] ?") == 2
        assert client.exists_batch(keys) == [True, False, True, False, True, True]
        assert client.remove_matching(namespace=f"{serial} 0") == 2
        assert client.exists_batch(keys) == [True, False, False, False, False, True]
        assert client.get_batch(keys) == [b"value", None, None, None, None, b"value"]
        assert client.remove_matching(pattern=f"matching {serial} *", force=True) == 2
        assert client.exists_batch(keys) == [False] * 6
        for arguments, wrong in (
            ({}, "needs a namespace or a pattern"),
            ({"pattern": "x" * 1025}, "1024 bytes"),
            ({"namespace": 5}, "namespace"),
        ):
            with pytest.raises(InvalidArgument, match=wrong):
                client.remove_matching(**arguments)

    @EVERYWHERE
    def test_what_lies_on_this_host_is_known_without_asking(self, client: Any, where: str) -> None:
        a, b = fresh_keys(2)
        client.put(a, b"value")
        client.get(a)
        if where == "here":
            eventually(lambda: client.exists_here([a, b]) == [True, False], "the block to be shown")
        else:
            assert client.exists_here([a, b]) == [False, False]
        assert client.exists_here([]) == []

    def test_a_namespace_is_a_text_or_an_object_with_an_id(self, client: Any) -> None:
        class Namespace:
            id = b"\x01" * 16

        a, b = fresh_keys(2)
        assert client.put(a, b"1", namespace="text") is True
        assert client.put(b, b"2", namespace=Namespace(), parent=a) is True

    @pytest.mark.promise("put-conflicts")
    @EVERYWHERE
    def test_writers_that_race_for_a_key_store_it_once(self, client: Any) -> None:
        keys = fresh_keys(5)
        values = [os.urandom(50_000) for _ in range(6)]
        with ThreadPoolExecutor(6) as threads:
            outcomes = list(threads.map(lambda value: client.put_batch(keys, [value] * 5), values))
        assert [sum(column) for column in zip(*outcomes, strict=True)] == [1] * 5
        for i, value in enumerate(client.get_batch(keys)):
            assert value in [v for v, outcome in zip(values, outcomes, strict=True) if outcome[i]]

    def test_many_readers_share_one_client(self, client: Any) -> None:
        keys = fresh_keys(40)
        values = [bytes([i]) * (1000 if i % 2 else 50_000) for i in range(40)]
        client.put_batch(keys, values)
        with ThreadPoolExecutor(8) as threads:
            assert all(got == values for got in threads.map(lambda _: client.get_batch(keys), range(16)))

    @EVERYWHERE
    def test_more_than_the_node_holds_passes_through_it(self, client: Any, running: Cluster, make_client: MakeClient, where: str) -> None:
        small = ClientSettings(frame_bytes=4 << 20)
        with make_client(running.address, settings=small) as client:
            for _ in range(6):
                keys = fresh_keys(32)
                assert client.put_batch(keys, [os.urandom(1 << 20)] * 32) == [True] * 32
            assert client.get(keys[-1]) is not None

    def test_a_value_that_can_never_fit_is_a_typed_error(self, client: Any) -> None:
        [key] = fresh_keys(1)
        with pytest.raises((Full, InvalidArgument)):
            client.put(key, np.empty(300 << 20, np.uint8), deadline_s=1.0)
        assert client.put(key, b"small") is True

    @EVERYWHERE
    def test_what_the_engine_moved_is_counted(self, client: Any, where: str) -> None:
        keys = fresh_keys(2)
        client.put_batch(keys, [b"x" * 100_000, b"y" * 1000])
        client.get_batch(keys)
        assert client.stats().engine_bytes == (200_000 if where == "by engine" else 0), "small ones go along with messages"

    @EVERYWHERE
    def test_what_was_done_is_counted(self, client: Any) -> None:
        a, b = fresh_keys(2)
        client.put(a, b"x" * 10)
        client.get_batch([a, b])
        stats = client.stats()
        assert (stats.requests, stats.puts, stats.hits, stats.misses, stats.bytes_in, stats.bytes_out) == (2, 1, 1, 1, 10, 10)
        assert stats.hits_by_tier["dram"] == 1

    def test_bad_keys_and_values_are_refused_and_nothing_is_sent(self, make_client: MakeClient) -> None:
        with make_client("127.0.0.1:1") as client:
            for key in (b"", b"x" * 256, "text"):
                with pytest.raises(InvalidArgument):
                    client.get(key)
            for value in (b"", np.ones((4, 4)).T, "text"):
                with pytest.raises(InvalidArgument):
                    client.put(b"k", value)

    def test_a_master_that_nobody_runs_is_unavailable(self, make_client: MakeClient) -> None:
        with make_client("127.0.0.1:1", deadline_s=5.0) as client, pytest.raises(Unavailable, match="no master can be reached"):
            client.get(b"k")

    def test_second_master_is_used_if_the_first_is_down(self, running: Cluster, make_client: MakeClient) -> None:
        with make_client(["127.0.0.1:1", running.address]) as client:
            assert client.get(b"nowhere") is None

    def test_a_closed_client_says_so(self, running: Cluster, make_client: MakeClient) -> None:
        with make_client(running.address) as client:
            client.get(b"nowhere")
            client.close()
            client.close()
            with pytest.raises(Closed):
                client.status()
            with pytest.raises(Closed):
                client.get(b"nowhere")
