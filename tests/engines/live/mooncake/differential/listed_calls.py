"""Calls that show the listed differences, a group each: differences.py has their reasons."""

from collections.abc import Iterator

from tests.engines.live.mooncake.differential.byte_calls import ByteCalls
from tests.engines.live.mooncake.differential.material import Arguments, Call, at, call


class ListedCalls(ByteCalls):
    """A method has the name of its difference."""

    def larger_elements(self) -> Iterator[Call]:
        for form in ({"$array": ["float32", [3, 4]]}, {"$array": ["int64", []]}):
            key = self.key()
            yield call("put", key, form)
            yield call("get", key)

    def strided_buffers(self) -> Iterator[Call]:
        for name in ("put", "upsert", "put_parts"):
            key = self.key()
            yield call(name, key, {"$strided": [3, 100]})
            yield call("get_size", key)

    def null_pointers(self) -> Iterator[Call]:
        yield call("put_from", self.key(), 0, 10)
        yield call("batch_put_from", [self.key(), self.key()], [at(0), 0], [5, 5])
        yield call("batch_put_from_multi_buffers", [self.key()], [[0]], [[5]])
        yield call("get_into", self.key(), 0, 100)

    def keys_twice(self) -> Iterator[Call]:
        for name in ("batch_put_from", "batch_upsert_from"):
            key = self.key()
            yield call(name, [key, key], [at(0), at(50)], [5, 6])
            yield call("get_size", key)

    def larger_buffers(self) -> Iterator[Call]:
        key = self.key()
        yield call("put", key, self.bytes(150))
        yield call("batch_get_into_multi_buffers", [key], [[at(10), at(3000)]], [[70, 90]])
        yield call("batch_get_into_multi_buffers", [key], [[at(10)]], [[1000]])
        yield call("get_into", key, at(0), 2**63)

    def leases_of_reads(self) -> Iterator[Call]:
        looks: list[tuple[str, Arguments]] = [
            ("get", lambda key: [key]),
            ("get_batch", lambda key: [[key]]),
            ("get_buffer", lambda key: [key]),
            ("get_into", lambda key: [key, at(0), 30_000]),
            ("batch_get_into", lambda key: [[key], [at(0)], [30_000]]),
            ("get_into_ranges", lambda key: [[at(0)], [[key]], [[[0]]], [[[0]]], [[[1]]]]),
            ("get_size", lambda key: [key]),
            ("get_replica_desc", lambda key: [key]),
            ("batch_get_session_start", lambda key: [[key]]),
        ]
        for name, arguments in looks:
            yield from self.removed_after(name, arguments)

    def hard_pins(self) -> Iterator[Call]:
        key = self.key()
        yield call("put", key, self.bytes(), {"$config": {"with_hard_pin": True}})
        yield call("remove", key)
        yield call("remove", key, True)

    def no_dimensions(self) -> Iterator[Call]:
        key = self.key()
        yield call("put_tensor", key, {"$tensor": ["float32", []]})
        yield call("get_size", key)
        yield call("get_tensor", key)
        yield call("get_tensor_into", key, at(0), 400)

    def parameters(self) -> Iterator[Call]:
        key = self.key()
        yield call("put_tensor", key, {"$tensor": ["float32", [4, 6], "parameter"]})
        yield call("get_tensor", key)

    def shards_of_others(self) -> Iterator[Call]:
        tensor = {"$tensor": ["float32", [4, 2]]}
        yield call("batch_put_tensor_with_tp", [self.key(), self.key(), self.key()], [tensor, tensor, "text"], tp_size=2)

    def ranges_beyond(self) -> Iterator[Call]:
        key = self.key()
        yield call("put", key, self.bytes(1000))
        yield call("batch_get_session_start", [key])
        yield call("batch_get_into_multi_buffer_ranges", [key], [[at(0), at(10)]], [[10, 10]], [[0, 995]])

    def puts_beside_sessions(self) -> Iterator[Call]:
        key = self.key()
        yield call("batch_put_session_start", [key], [10])
        yield call("put", key, self.bytes(5))
        yield call("get", key)
        yield call("batch_put_session_end", [key])

    def same_node(self) -> Iterator[Call]:
        yield call("put", self.key(), self.bytes(), {"$config": {"prefer_alloc_in_same_node": True}})

    def empty_batches(self) -> Iterator[Call]:
        yield call("get_batch", [])
        yield call("$unset", "get_batch", ["k", "l"])
        yield call("$unset", "batch_put_from_multi_buffers", ["k"], [[at(0)]], [[5]])
        for name in ("batch_get_session_start", "batch_put_session_end", "batch_put_session_revoke"):
            yield call("$unset", name, ["k"])
        yield call("$unset", "batch_put_session_start", ["k"], [5])
        for name in ("batch_get_into_multi_buffer_ranges", "batch_put_from_multi_buffer_ranges"):
            yield call("$unset", name, ["k"], [[at(0)]], [[1]], [[0]])

    def other_name_of_the_master(self) -> Iterator[Call]:
        yield call("$setup", {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", "master_server_address": "MASTER"})
