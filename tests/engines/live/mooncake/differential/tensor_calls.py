"""Generated calls of tensors, whole and in shards."""

from collections.abc import Iterator
from typing import Final

from tests.engines.live.mooncake.differential.material import Call, Material, at, call

DTYPES: Final = (
    *("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
SHAPES: Final = ([1], [7], [0], [4, 6], [2, 0, 3], [2, 3, 4], [2] * 8, [1] * 9, [1] * 13)


class TensorCalls(Material):
    """A group of calls a method."""

    def tensors(self) -> Iterator[Call]:
        """Tensors of every type and shape."""
        made = [[dtype, self.random.choice(SHAPES)] for dtype in DTYPES] + [["float32", shape] for shape in SHAPES]
        made += [["float32", [4, 6], form] for form in ("transposed", "sliced", "sparse", "meta", "grad", "view")] + [
            ["complex64", [3], "conj"]
        ]
        keys = [self.key() for _ in made]
        for key, tensor in zip(keys, made, strict=True):
            yield call(self.random.choice(("put_tensor", "upsert_tensor", "pub_tensor", "upsert_pub_tensor")), key, {"$tensor": tensor})
            yield call("get_tensor", key)
            yield call("get_size", key)
        some = self.random.sample(range(len(made)), 5)
        batch, tensors = [self.key() for _ in some], [{"$tensor": made[index]} for index in some]
        for name in ("batch_put_tensor", "batch_upsert_tensor", "batch_pub_tensor", "batch_upsert_pub_tensor"):
            yield call(name, batch, tensors)
        yield call("batch_get_tensor", [*batch, self.key()])
        for odd in ("text", None, 5, {"$bytes": [1, 5]}, {"$array": ["float32", [3]]}, [1.0]):
            yield call("put_tensor", self.key(), odd)
            yield call("batch_put_tensor", [self.key()], [odd])
        good = {"$tensor": ["int32", [4]]}
        for name in ("batch_put_tensor", "batch_upsert_tensor", "batch_pub_tensor"):
            yield call(name, [self.key(), self.key()], [good])
            yield call(name, [], [])
            yield call(name, [self.key()], {"$tuple": [good]})
            yield call(name, self.key(), [good])
            yield call(name, [self.key(), self.key()], [good, None])
            yield call(name, [self.key()], good)
        yield call("put", self.key("raw"), self.bytes(1000))
        yield call("put", self.key("tiny"), self.bytes(3))
        yield call("batch_get_tensor", [self.key("raw"), self.key("tiny"), self.key()])
        yield call("get_tensor_into_cuda", keys[0], good)
        yield call("batch_get_tensor_into_cuda", [keys[0]], [good])
        yield call("batch_get_tensor_into_cuda", [keys[0]], [])
        yield call("pub_tensor", self.key(), good, {"$config": {"preferred_segments": ["x", "y"]}})
        yield call("batch_pub_tensor", [self.key()], [good], {"$config": {"preferred_segments": ["x", "y"]}})

    def tensor_memory(self) -> Iterator[Call]:
        """Tensors in memory by its address."""
        for tensor in (["float32", [4, 6]], [self.random.choice(DTYPES[:13]), [3, 5]], ["int64", [1]], ["float16", [2, 0]]):
            key = self.key()
            yield call("put_tensor", key, {"$tensor": tensor})
            yield call("get_tensor_into", key, at(64), 8192)
            yield call("get_tensor_into", key, at(64), 100)
            yield call("batch_get_tensor_into", [key, self.key()], [at(1024), at(9000)], [4096, 4096])
            for name in ("put_tensor_from", "upsert_tensor_from"):
                yield call(name, self.key("from" + name), at(1024), 4096)
                yield call(name, self.key("from" + name), at(1024), {"$numpy": ["int64", 10]})
                yield call("get_tensor", self.key("from" + name))
            yield call("batch_put_tensor_from", [self.key(), self.key()], [at(1024), at(1024)], [4096, 4096])
        key = self.key()
        yield call("put_tensor", key, {"$tensor": ["int32", [10]]})
        size = 304 + 40
        yield call("get_tensor_into", key, at(0), size)
        for name in ("put_tensor_from", "upsert_tensor_from"):
            yield call(name, self.key(name), at(0), size)
            yield call("get_tensor", self.key(name))
            for pointer, length in ((at(0), size - 1), (at(0), size + 1), (0, size), (at(0), 0), (at(0), 303), (at(5000), size)):
                yield call(name, self.key(), pointer, length)
        yield call("batch_put_tensor_from", [self.key("x"), self.key("y")], [at(0), at(0)], [size, size])
        yield call("batch_upsert_tensor_from", [self.key("x"), self.key("y")], [at(0), at(0)], [size, size])
        yield call("batch_get_tensor", [self.key("x"), self.key("y")])
        for name in ("batch_put_tensor_from", "batch_upsert_tensor_from", "batch_get_tensor_into"):
            one, two = (key, key) if "get" in name else (self.key(), self.key())
            yield call(name, [one, two], [at(0)], [size])
            yield call(name, [one, two], [at(0), 0], [size, size])
            yield call(name, [one, two], [at(0), at(6000)], [size, size])
            yield call(name, [], [], [])
            yield call(name, one, at(0), size)
        yield call("get_tensor_into", self.key(), at(0), size)
        yield call("get_tensor_into", key, 0, size)
        yield call("get_tensor_into", key, at(0), -1)

    def shards(self) -> Iterator[Call]:
        """Tensors that are cut for ranks."""
        for _ in range(8):
            dtype = self.random.choice(("float32", "int64", "bfloat16", "uint8", "complex64"))
            shape = self.random.choice(([8], [4, 6], [6, 4, 2], [5, 3], [1], [0], [2, 0]))
            size, dim = self.random.choice((1, 2, 3, 4, 0, -1, 8)), self.random.choice((0, 1, 0, 1, -1, 2, 5, -4))
            rank = self.random.choice((0, 1, 3, -1))
            key = self.key()
            name = self.random.choice(("put_tensor_with_tp", "pub_tensor_with_tp"))
            yield call(name, key, {"$tensor": [dtype, shape]}, tp_rank=rank, tp_size=size, split_dim=dim)
            for of in range(-1, 4):
                yield call("get_tensor_with_tp", key, of, size, dim)
            yield call("batch_get_tensor_with_tp", [key, self.key()], 1, size)
            yield call("get_size", key + "_tp_0")
            yield call("is_exist", key)
        for name in ("batch_put_tensor_with_tp", "batch_pub_tensor_with_tp"):
            tensors = [{"$tensor": ["float32", [4, 2]]}, {"$tensor": ["int32", [2]]}, {"$tensor": ["int32", []]}]
            keys = [self.key() for _ in tensors]
            yield call(name, keys, tensors, tp_rank=0, tp_size=2, split_dim=0)
            yield call("batch_get_tensor_with_tp", keys, 1, 2)
            yield call(name, [self.key() for _ in keys], [*tensors[:2], None], tp_size=2)
            yield call(name, [self.key() for _ in keys], tensors[:2], tp_size=2)
            yield call(name, [], [], tp_size=2)
            yield call(name, keys, tensors, tp_size=2, split_dim=1)
            yield call(name, [self.key() for _ in keys], tensors, tp_size=2, split_dim=1)
        for odd in ("text", None, 5, {"$array": ["float32", [4]]}):
            yield call("put_tensor_with_tp", self.key(), odd, 0, 2)
            yield call("put_tensor_with_tp", self.key(), odd, 0, 1)
        yield call("pub_tensor_with_tp", self.key(), {"$tensor": ["int32", [4]]}, {"$config": {"preferred_segments": ["x", "y"]}}, 0, 2)
        yield call("put_tensor_with_tp", self.key(), {"$tensor": ["float32", [4, 6], "transposed"]}, 0, 2, 1)
        yield call("put_tensor_with_tp", self.key(), {"$tensor": ["float32", [4, 6], "sparse"]}, 0, 2, 1)

    def shard_memory(self) -> Iterator[Call]:
        """Shards in memory by its address."""
        key, size = self.key(), 304 + 96
        yield call("put_tensor", key, {"$tensor": ["float32", [4, 6]]})
        yield call("get_tensor_into", key, at(0), size)
        whole = self.key("whole")
        for name in ("put_tensor_with_tp_from",):
            yield call(name, whole, at(0), size, 0, 2, 1)
            for rank in range(3):
                yield call("get_tensor_with_tp_into", whole, at(2048), 4096, rank, 2, 1)
                yield call("get_tensor_with_tp", whole, rank, 2)
            yield call("get_tensor_with_tp_into", whole, at(2048), 4096)
            yield call("batch_get_tensor_with_tp_into", [whole, key], [at(2048), at(8192)], [4096, 4096], 1, 2)
            yield call("batch_get_tensor_with_tp_into", [key, self.key()], [at(2048), at(8192)], [4096, 4096])
            yield call("batch_get_tensor_with_tp_into", [key, self.key()], [at(2048)], [4096, 4096], 0, 2)
            yield call("batch_get_tensor_with_tp_into", [whole, whole], [at(2048), 0], [4096, 4096], 0, 2)
            yield call("get_tensor_with_tp_into", whole, 0, 4096, 0, 2)
            yield call(name, self.key(), at(0), size, 0, 5, 0)
            yield call(name, self.key(), at(0), size, 0, 2, 7)
            yield call(name, self.key(), at(0), size - 1, 0, 2, 0)
            yield call(name, self.key(), 0, size, 0, 2, 0)
            yield call(name, self.key(), at(5000), size, 0, 2, 0)
            yield call(name, self.key("single"), at(0), size)
            yield call("get_tensor", self.key("single"))
        name = "batch_put_tensor_with_tp_from"
        one, two = self.key(), self.key()
        yield call(name, [one, two], [at(0), at(0)], [size, size], 0, 2, 0)
        yield call("batch_get_tensor_with_tp", [one, two], 1, 2)
        yield call(name, [self.key(), self.key()], [at(0), at(5000)], [size, size], 0, 2, 0)
        yield call(name, [self.key(), self.key()], [at(0), 0], [size, size], 0, 2, 0)
        yield call(name, [self.key(), self.key()], [at(0), at(0)], [size, 10], 0, 2, 0)
        yield call(name, [self.key(), self.key()], [at(0)], [size], 0, 2, 0)
        yield call(name, [], [], [], 0, 2, 0)
        yield call(name, [self.key()], [at(0)], [size])
