"""Generated calls of Mooncake's transfer engine, on memory of the process itself: an engine is its own peer."""

from collections.abc import Iterator

from tests.engines.live.mooncake.differential.material import OTHER, REGION_BYTES, Call, Json, Material, at, call

ME = {"$self": 0}
"""The engine's own name."""


def engine(name: str, *arguments: Json, **named: Json) -> Call:
    return call("$engine", name, *arguments, **named)


class EngineCalls(Material):
    """A group of calls a method."""

    def engines(self) -> Iterator[Call]:
        yield engine("get_first_buffer_address", ME)
        yield engine("register_memory", at(0), REGION_BYTES)
        yield from self.engine_memory()
        for _ in range(6):
            size, to, of = self.size(), self.random.randrange(32_000, 45_000), self.random.randrange(10_000)
            name = self.random.choice(("transfer_sync_write", "transfer_sync_read"))
            yield engine(name, ME, self.number(at(of)), self.number(at(to)), self.number(size))
            yield engine("batch_" + name, ME, [at(of), at(0)], [at(to), at(60_000)], [size, 100])
            yield engine("transfer_sync", ME, at(of, OTHER), at(to), size, {"$opcode": "Read"})
        yield engine(
            "batch_transfer_sync", ME, {"$numpys": ["uint64", [at(0)]]}, [at(100)], {"$numpys": ["int32", [9]]}, {"$opcode": "Write"}
        )
        for lists in (([at(0)], [at(1)], [1, 2]), ([at(0)], [], [1]), ([], [], [])):
            yield engine("batch_transfer_sync_write", ME, *lists)
        for target in (at(REGION_BYTES + 1), at(REGION_BYTES - 5), at(0, OTHER)):
            yield engine("transfer_sync_write", ME, at(0), target, 10)
        for peer in ("127.0.0.1:1", "nowhere", ""):
            yield engine("transfer_sync_write", peer, at(0), at(0), 10)
            yield engine("transfer_submit_write", peer, at(0), at(0), 10)
            yield engine("get_first_buffer_address", peer)
        names: list[Json] = [5, ["x"]]
        for name in names:
            yield engine("transfer_sync_write", name, at(0), at(0), 10)
        numbers: list[Json] = [-1, 1.5, "1", None, 2**64]
        for odd in numbers:
            yield engine("transfer_sync_write", ME, odd, at(0), 10)
            yield engine("transfer_sync_read", ME, at(0), at(0), odd)
        for opcode in (0, "Write", None):
            yield engine("transfer_sync", ME, at(0), at(0), 10, opcode)
        yield engine("transfer_sync", ME, at(0), at(10), 10, {"$opcode": "Write"}, {"$notify": ["name", "message"]})
        yield engine("send_probe", ME)
        yield engine("warmup_efa_segment", "x")
        yield engine("unregister_memory", at(0))
        yield engine("transfer_sync_write", ME, at(0), at(0), 10)

    def engine_memory(self) -> Iterator[Call]:
        for pointer, size in ((at(0), 10), (at(0), REGION_BYTES), (at(100), 10), (at(REGION_BYTES - 1), 10), (at(0, OTHER), 0)):
            yield engine("register_memory", pointer, size)
        for odd in (-1, 1.5, "1", None):
            yield engine("register_memory", odd, 10)
            yield engine("unregister_memory", odd)
        yield engine("unregister_memory", at(100))
        yield engine("unregister_memory", at(5, OTHER))
        yield engine("batch_register_memory", [at(0, OTHER), at(4096, OTHER)], [4096, 4096])
        yield engine("batch_unregister_memory", [at(0, OTHER), at(4096, OTHER)])
        yield engine("batch_unregister_memory", [at(0, OTHER)])
        yield engine("batch_unregister_memory", [])
        yield engine("write_bytes_to_buffer", at(0), {"$bytes": [1, 10]}, 10)
        yield engine("read_bytes_from_buffer", at(0), 10)
