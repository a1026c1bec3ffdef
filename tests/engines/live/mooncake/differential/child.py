"""Executes generated calls of Mooncake's store API: `python child.py CONFIG < CALLS > RESULTS`, a JSON line a group of calls each way.

The package `mooncake` is the one that the interpreter finds, so that one program serves Mooncake's wheel and the drop-in. It imports
nothing else that only one of the two environments has. A line is flushed per call: the last one names the call that ended the process.
"""

import ctypes
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import mooncake.store
import numpy as np

REGION_BYTES = 1 << 16
REGIONS = 3
DEADLINE_S = 40.0
FORMS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda tensor: tensor.t(),
    "sliced": lambda tensor: tensor[1:],
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "grad": lambda tensor: tensor.requires_grad_(),
    "parameter": lambda tensor: sys.modules["torch"].nn.Parameter(tensor),
    "conj": lambda tensor: tensor.conj(),
    "view": lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
}


def digest(value: Any) -> str:
    return hashlib.blake2b(bytes(value), digest_size=6).hexdigest()


class Child:
    """A store that is set up, memory with addresses, and the objects that calls name."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.rooms = [np.zeros(REGION_BYTES + 4096, np.uint8) for _ in range(REGIONS)]
        self.addresses = [(int(room.ctypes.data) + 4095) // 4096 * 4096 for room in self.rooms]
        self.kept: list[Any] = []
        self.transfers: Any = None
        self.store = self.fresh()
        code = self.store.setup(*config["setup"])
        if code:
            raise SystemExit(f"setup: {code}")

    def fresh(self) -> Any:
        return mooncake.store.MooncakeDistributedStore()

    def refill(self) -> None:
        """Give each region the bytes that every group begins with."""
        for number, address in enumerate(self.addresses):
            pattern = np.random.default_rng(number).integers(0, 256, REGION_BYTES, np.uint8)
            ctypes.memmove(address, pattern.ctypes.data, REGION_BYTES)

    def regions(self) -> list[str]:
        return [digest(ctypes.string_at(address, REGION_BYTES)) for address in self.addresses]

    # --- arguments ---

    def argument(self, given: Any) -> Any:
        """JSON has scalars and lists; a dictionary with one entry `$KIND` stands for anything else."""
        if isinstance(given, list):
            return [self.argument(item) for item in given]
        if not isinstance(given, dict):
            return given
        if len(given) != 1 or not next(iter(given)).startswith("$"):
            return {key: self.argument(value) for key, value in given.items()}
        [(kind, value)] = given.items()
        return getattr(self, "make_" + kind[1:])(value)

    def make_bytes(self, value: list[int]) -> bytes:
        seed, size = value
        return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()

    def make_text(self, value: str) -> bytes:
        return value.encode()

    def make_bytearray(self, value: list[int]) -> bytearray:
        return bytearray(self.make_bytes(value))

    def make_view(self, value: list[int]) -> memoryview:
        return memoryview(self.make_bytes(value))

    def make_strided(self, value: list[int]) -> Any:
        return memoryview(self.make_bytes(value))[::2]

    def make_array(self, value: list[Any]) -> Any:
        dtype, shape = value
        return np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)

    def make_at(self, value: list[int]) -> int:
        number, offset = value
        return self.addresses[number] + offset

    def make_numpy(self, value: list[Any]) -> Any:
        dtype, number = value
        return getattr(np, dtype)(self.argument(number))

    def make_numpys(self, value: list[Any]) -> Any:
        dtype, numbers = value
        return np.array(self.argument(numbers), dtype=dtype)

    def make_tuple(self, value: list[Any]) -> tuple[Any, ...]:
        return tuple(self.argument(value))

    def make_set(self, value: list[Any]) -> set[Any]:
        return set(self.argument(value))

    def make_generator(self, value: list[Any]) -> Any:
        return (item for item in self.argument(value))

    def make_tensor(self, value: list[Any]) -> Any:
        import torch

        dtype, shape, *forms = value
        kind = getattr(torch, dtype)
        tensor = (torch.arange(int(np.prod(shape))) % 120).to(kind).reshape(shape)
        for form in forms:
            tensor = FORMS[form](tensor)
        return tensor

    def make_config(self, value: dict[str, Any]) -> Any:
        config = mooncake.store.ReplicateConfig()
        for name, given in value.items():
            setattr(config, name, self.argument(given))
        return config

    def make_enum(self, value: list[str]) -> Any:
        kind, name = value
        return getattr(getattr(mooncake.store, kind), name)

    def make_none_store(self, value: Any) -> Any:
        return self.fresh()

    def make_self(self, value: Any) -> str:
        return f"127.0.0.1:{self.engine().get_rpc_port()}"

    def make_opcode(self, name: str) -> Any:
        return getattr(importlib.import_module("mooncake.engine").TransferOpcode, name)

    def make_notify(self, value: list[str]) -> Any:
        return importlib.import_module("mooncake.engine").TransferNotify(*value)

    def engine(self) -> Any:
        """A transfer engine of this process, made at its first use."""
        if self.transfers is None:
            self.transfers = importlib.import_module("mooncake.engine").TransferEngine()
            code = self.transfers.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
            if code:
                raise SystemExit(f"initialize: {code}")
        return self.transfers

    # --- calls ---

    def do_engine(self, name: str, *arguments: Any) -> Any:
        """A call of the transfer engine. An address in a result is where it lies in the regions."""
        found = getattr(self.engine(), name)(*arguments)
        return self.addresses.index(found) if found in self.addresses else found

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        own = getattr(self, "do_" + name.removeprefix("$"), None) if name.startswith("$") else None
        return own(*arguments, **named) if own else getattr(self.store, name)(*arguments, **named)

    def do_unset(self, name: str, *arguments: Any) -> Any:
        """A call of a store that has not been set up."""
        return getattr(self.fresh(), name)(*arguments)

    def do_closed(self, name: str, *arguments: Any) -> Any:
        """A call of a store that was closed."""
        store = self.fresh()
        store.setup(*self.config["setup"])
        store.close()
        return getattr(store, name)(*arguments)

    def do_setup(self, *arguments: Any, **named: Any) -> Any:
        """The code of another store's setup. Mooncake's objects live in its clients, so that this one puts nothing."""
        store = self.fresh()
        filled = [self.fill(item) for item in arguments]
        code = store.setup(*filled, **{name: self.fill(item) for name, item in named.items()})
        store.close()
        return code

    def fill(self, item: Any) -> Any:
        if isinstance(item, dict):
            return {name: self.fill(value) for name, value in item.items()}
        return self.config["master"] if item == "MASTER" else item

    def do_eventually(self, wanted: Any, name: str, *arguments: Any) -> Any:
        """Repeat a call until it has a result."""
        end = time.monotonic() + DEADLINE_S
        while (found := getattr(self.store, name)(*arguments)) != wanted and time.monotonic() < end:
            time.sleep(0.2)
        return found

    def do_names(self, module: str, *path: str) -> list[str]:
        place: Any = importlib.import_module(f"mooncake.{module}")
        for name in path:
            place = getattr(place, name)
        return sorted(name for name in dir(place) if not name.startswith(("__", "_pybind11")))

    def do_attribute(self, kind: str, name: str, value: Any) -> Any:
        """Set an attribute of a new object, and read it."""
        held = getattr(mooncake.store, kind)()
        setattr(held, name, value)
        return getattr(held, name)

    def do_module(self, name: str, *arguments: Any) -> Any:
        found = getattr(mooncake.store, name)
        return found(*arguments) if callable(found) else found

    def do_constants(self, kind: str) -> list[Any]:
        held = getattr(mooncake.store, kind)
        names = held.__members__
        return sorted([name, int(member.value), member.name] for name, member in names.items())

    # --- results ---

    def result(self, found: Any) -> Any:
        if hasattr(found, "name") and hasattr(found, "value"):
            return ["enum", type(found).__name__, found.name]
        if found is None or isinstance(found, bool | str | int | float):
            return found
        if isinstance(found, bytes):
            return ["bytes", len(found), digest(found)]
        if isinstance(found, list | tuple):
            return [self.result(item) for item in found]
        if isinstance(found, dict):
            return {str(key): self.result(value) for key, value in found.items()}
        kind = type(found).__name__
        if kind == "BufferHandle":
            return ["buffer", found.size(), len(found), digest(memoryview(found))]
        if kind == "Tensor":
            import torch

            return ["tensor", str(found.dtype), list(found.shape), digest(found.contiguous().reshape(-1).view(torch.uint8).numpy())]
        if kind == "ReplicaDescriptor":
            memory = found.get_memory_descriptor().buffer_descriptor if found.is_memory_replica() else None
            return ["replica", found.status.name, found.is_memory_replica(), found.is_disk_replica(), memory and memory.size]
        return ["object", kind]

    def run(self, call: dict[str, Any]) -> Any:
        try:
            arguments = [self.argument(item) for item in call.get("a", [])]
            named = {name: self.argument(item) for name, item in call.get("k", {}).items()}
            self.kept.append((arguments, named))
        except Exception as error:  # noqa: BLE001 what an environment cannot make, such as a torch type
            return {"unmade": type(error).__name__}
        try:
            return self.result(self.call(call["m"], *arguments, **named))
        except Exception as error:  # noqa: BLE001 the kind of any error is a result
            return {"raises": type(error).__name__}


def main() -> None:
    child = Child(json.loads(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        child.refill()
        child.kept.clear()
        for call in json.loads(line):
            print(json.dumps([child.run(call), child.regions()]), flush=True)
    child.store.close()


if __name__ == "__main__":
    main()
