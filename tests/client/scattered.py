"""Both clients with scattered values, results per key, ranges and replacement, against real daemons.

A test class that test_sync.py and test_aio.py inherit; it runs on the node's host and as a remote client
(behaviour.py).
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client import Memory
from kvstore.protocol.errors import Full, InvalidArgument, Unavailable
from tests.client.behaviour import EVERYWHERE, SIZES, MakeClient, fresh_keys
from tests.client.processes import Cluster


def cut(value: Any, *at: int) -> list[Any]:
    """The value in parts that end at these offsets."""
    view = memoryview(value).cast("B")
    return [view[begin:end] for begin, end in pairwise((0, *at, len(view)))]


def address(array: "np.ndarray[Any, Any]") -> int:
    return int(array.ctypes.data)


class ScatteredBehaviour:
    @EVERYWHERE
    @pytest.mark.parametrize("size", [*SIZES, 20 << 20])
    def test_parts_are_one_value_in_order(self, client: Any, size: int) -> None:
        value = os.urandom(size)
        one, other = fresh_keys(2)
        assert client.put(one, cut(value, size // 3, size // 3, size - size // 4)) is True
        assert client.get(one) == value
        into = bytearray(size)
        assert client.get_into(one, cut(into, size // 2)) == size
        assert into == value
        assert client.put_batch([one, other], [cut(value, size // 5), tuple(cut(value, size // 5))]) == [False, True]
        again = np.zeros(size + 10, np.uint8)
        assert client.get_batch_into([other, b"nowhere"], [cut(again, size // 2, size), [bytearray(1)]]) == [size, None]
        assert again.tobytes() == value + bytes(10)

    def test_more_parts_than_the_kernel_takes_at_once(self, client: Any) -> None:
        value = np.frombuffer(os.urandom(3000 * 40), np.uint8).reshape(3000, 40)
        [key] = fresh_keys(1)
        assert client.put_batch([key], [list(value)]) == [True]
        into = np.zeros_like(value)
        assert client.get_batch_into([key], [list(into)]) == [value.nbytes]
        assert np.array_equal(into, value)

    @EVERYWHERE
    def test_many_scattered_values_in_a_batch(self, client: Any) -> None:
        layers = np.random.default_rng(3).integers(0, 256, (4, 64, 3000), dtype=np.uint8)
        keys = fresh_keys(64)
        assert client.put_batch(keys, [list(layers[:, block]) for block in range(64)]) == [True] * 64
        into = np.zeros_like(layers)
        assert client.get_batch_into(keys, [list(into[:, block]) for block in range(64)]) == [12_000] * 64
        assert np.array_equal(into, layers)

    def test_a_pointer_with_a_size_is_a_buffer(self, client: Any) -> None:
        value, into = np.frombuffer(os.urandom(100_000), np.uint8).copy(), np.zeros(100_000, np.uint8)
        a, b = fresh_keys(2)
        whole = Memory(address(value), 100_000)
        assert client.put(a, whole) is True
        assert client.put_batch_from([b], [[Memory(address(value), 60_000), Memory(address(value) + 60_000, 40_000)]]) == [True]
        assert client.get_into(a, Memory(address(into), 100_000)) == 100_000
        assert np.array_equal(into, value)
        into.fill(0)
        with client.register(Memory(address(into), 100_000)):
            assert client.get_batch_into([b], [[Memory(address(into), 1), Memory(address(into) + 1, 99_999)]]) == [100_000]
        assert np.array_equal(into, value)

    def test_tensors_are_parts(self, client: Any) -> None:
        layers = [torch.full((100, 8), layer, dtype=torch.bfloat16) for layer in range(3)]
        [key] = fresh_keys(1)
        client.put(key, layers)
        into = [torch.empty_like(layer) for layer in layers]
        assert client.get_batch_into([key], [into]) == [3 * 1600]
        assert all(map(torch.equal, layers, into))

    def test_parts_that_are_none_are_refused(self, client: Any) -> None:
        for value in ([], [b""], [b"a", "text"], [[b"a"]], [b"a", np.ones((3, 4)).T]):
            with pytest.raises(InvalidArgument):
                client.put(fresh_keys(1)[0], value)
        for buffer in ([], [bytearray()], [bytearray(1), b"read-only"]):
            with pytest.raises(InvalidArgument):
                client.get_into(b"key", buffer)

    @pytest.mark.promise("value-layouts")
    @EVERYWHERE
    def test_each_key_of_a_put_has_its_result(self, client: Any) -> None:
        a, b, c, d = fresh_keys(4)
        client.put(b, b"before")
        values = [b"1" * 100_000, b"2", b"", [b"3", b"4"], b"5"]
        stored, present, empty, parts, no_key = client.put_batch_from([a, b, c, d, b""], values, parents=[None, a, b, c, d])
        assert (stored, present, parts) == (True, False, True)
        assert isinstance(empty, InvalidArgument)
        assert isinstance(no_key, InvalidArgument)
        assert client.get_batch([a, b, c, d]) == [b"1" * 100_000, b"before", None, b"34"]
        assert client.put_batch_from([], []) == []
        assert [type(result) for result in client.put_batch_from([b""], [b"1"])] == [InvalidArgument]

    def test_value_too_large_for_every_tier_fails_alone(self, client: Any) -> None:
        a, b, c = fresh_keys(3)
        huge = np.zeros(300 << 20, np.uint8)
        before, too_large, after = client.put_batch_from([a, b, c], [b"1" * 2000, huge, b"3" * 2000], deadline_s=20.0)
        assert (before, after) == (True, True)
        assert isinstance(too_large, (InvalidArgument, Full))
        assert client.get_batch([a, b, c]) == [b"1" * 2000, None, b"3" * 2000]

    @pytest.mark.promise("value-layouts")
    @EVERYWHERE
    def test_each_key_of_a_get_has_its_result(self, client: Any) -> None:
        a, b = fresh_keys(2)
        client.put_batch([a, b], [b"1" * 100_000, b"2" * 10])
        into, small, parts = bytearray(100_000), bytearray(9), [bytearray(4), bytearray(20)]
        found = client.get_each_into([a, b, b"nowhere", b, "text", a], [into, small, bytearray(1), parts, bytearray(1), b"read-only"])
        assert (found[0], found[2], found[3]) == (100_000, None, 10)
        assert "the buffer of key 1 has 9 bytes, its value has 10" in str(found[1])
        assert [type(found[i]) for i in (1, 4, 5)] == [InvalidArgument] * 3
        assert (bytes(into), bytes(parts[0]), bytes(parts[1][:6])) == (b"1" * 100_000, b"2222", b"222222")
        assert client.get_each_into([], []) == []
        assert [type(result) for result in client.get_each_into([b""], [bytearray(1)])] == [InvalidArgument]

    def test_results_a_key_of_many_that_are_too_large(self, client: Any) -> None:
        keys = fresh_keys(40)
        client.put_batch(keys, [b"%d" % i * 1000 for i in range(40)])
        found = client.get_each_into(keys, [bytearray(2000 if i % 2 else 10) for i in range(40)])
        assert [type(result) for result in found] == [InvalidArgument, int] * 20

    def test_a_cluster_out_of_reach_is_the_result_of_every_key(self, make_client: MakeClient) -> None:
        with make_client("127.0.0.1:1", deadline_s=5.0) as client:
            assert [type(result) for result in client.put_batch_from([b"a", b"b"], [b"1", b""])] == [Unavailable, InvalidArgument]
            assert [type(result) for result in client.get_each_into([b"a", b""], [bytearray(1)] * 2)] == [Unavailable, InvalidArgument]
            assert [type(result) for result in client.get_ranges_into([b"a"], [0], [bytearray(1)])] == [Unavailable]

    def test_what_concerns_no_key_is_raised(self, client: Any) -> None:
        room = bytearray(1)
        for call in (
            partial(client.put_batch_from, [b"a"], []),
            partial(client.put_batch_from, [b"a"], [b"1"], ack="soon"),
            partial(client.get_each_into, [b"a"], []),
            partial(client.get_ranges_into, [b"a"], [], [room]),
            partial(client.get_ranges_into, [b"a"], ["1"], [room]),
            partial(client.get_each_into, [b"a"], [room], deadline_s=0),
        ):
            with pytest.raises(InvalidArgument):
                call()

    @EVERYWHERE
    @pytest.mark.parametrize("size", [100, 100_000, 3 << 20])
    def test_ranges_of_values_are_read(self, client: Any, size: int) -> None:
        value = os.urandom(size)
        [key] = fresh_keys(1)
        client.put(key, value)
        begin, middle, end = bytearray(10), [bytearray(20), bytearray(30)], bytearray(1)
        outside, too_long, before = bytearray(2), bytearray(size + 1), bytearray(1)
        found = client.get_ranges_into(
            [key, key, key, key, b"nowhere", key, b"", key],
            [0, 17, size - 1, size - 1, 0, 0, 0, -1],
            [begin, middle, end, outside, bytearray(1), too_long, bytearray(1), before],
        )
        assert (found[:3], found[4]) == ([10, 50, 1], None)
        assert [type(found[i]) for i in (3, 5, 6, 7)] == [InvalidArgument] * 4
        assert (bytes(begin), bytes(middle[0] + middle[1]), bytes(end)) == (value[:10], value[17:67], value[-1:])
        assert client.get_ranges_into([], [], []) == []

    def test_ranges_of_more_values_than_are_brought_at_once(self, client: Any) -> None:
        keys = fresh_keys(70)
        client.put_batch(keys, [b"%4d" % i * 1000 for i in range(70)])
        into = np.zeros((70, 4), np.uint8)
        assert client.get_ranges_into(keys, [400] * 70, list(into)) == [4] * 70
        assert [row.tobytes() for row in into] == [b"%4d" % i for i in range(70)]

    @EVERYWHERE
    def test_a_replaced_value_is_the_new_one_at_once_and_everywhere(self, client: Any, running: Cluster, make_client: MakeClient) -> None:
        keys = fresh_keys(2)
        with make_client(running.address) as other:
            for round in range(10):
                values = [b"%d" % round * 1000, b"%d" % round * (100_000 + round)]
                assert client.replace(keys, values, ack="cluster") == [True, True]
                assert client.get_batch(keys) == values
                assert other.get_batch(keys) == values
            assert client.replace(keys, [b"early", [b"ear", b"ly"]], ack="node") == [True, True]
            assert client.get_batch(keys) == [b"early"] * 2
            client.flush()
            assert other.get_batch(keys) == [b"early"] * 2

    def test_a_pinned_value_is_replaced_by_force_only(self, client: Any) -> None:
        [key] = fresh_keys(1)
        client.put(key, b"old", ack="cluster")
        client.pin([key])
        assert client.replace([key], [b"new"]) == [False]
        assert client.get(key) == b"old"
        assert client.replace([key], [b"new"], force=True) == [True]
        assert client.get(key) == b"new"

    def test_nothing_is_removed_for_a_value_that_is_none(self, client: Any) -> None:
        [key] = fresh_keys(1)
        client.put(key, b"old")
        for bad in ([b""], [b"1", b"2"]):
            with pytest.raises(InvalidArgument):
                client.replace([key], bad)
        assert client.get(key) == b"old"

    @pytest.mark.promise("no-partial-blocks")
    def test_reader_during_replace_sees_old_new_or_miss(self, client: Any, running: Cluster, make_client: MakeClient) -> None:
        [key] = fresh_keys(1)
        values = [bytes([round]) * (200_000 + round) for round in range(30)]
        is_over = False

        def read(reader: Any) -> int:
            seen, into = 0, np.zeros(300_000, np.uint8)
            while not is_over or not seen:
                size = reader.get_into(key, [into[:1000], into[1000:]])
                if size is not None:
                    seen += 1
                    assert into[:size].tobytes() == values[size - 200_000]
            return seen

        with make_client(running.address) as reader, ThreadPoolExecutor(1) as thread:
            reading = thread.submit(read, reader)
            try:
                for value in values:
                    assert client.replace([key], [value], force=True) == [True]
            finally:
                is_over = True
            assert reading.result(60) > 0

    @pytest.mark.promise("no-partial-blocks")
    @EVERYWHERE
    def test_a_view_of_what_is_replaced_keeps_the_old_value(self, client: Any) -> None:
        [key] = fresh_keys(1)
        client.put(key, b"o" * 100_000)
        with client.view(key) as old:
            assert client.replace([key], [b"n" * 100_000], force=True) == [True]
            assert old == b"o" * 100_000
        assert client.get(key) == b"n" * 100_000
