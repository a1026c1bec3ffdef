"""Start-up module of a Python that runs SGLang on a CPU, for tests: it supplies what SGLang takes from CUDA builds.

- Host memory is neither registered with a device nor pinned for it.
- torch copies between host and device pools.
- Streams and events of the CPU are always complete.
- torchvision, whose wheel has CUDA kernels only, is imported without them.

SGLang's own logic is unchanged.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

COMMON = "sglang.srt.mem_cache.pool_host.common"
POOLS = "sglang.srt.mem_cache.pool_host.mha"
ADAPTERS = "sglang.srt.lora.layers"
PREFILL = "sglang.srt.disaggregation.prefill"


class Event:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Create an event of the CPU: recorded work is already complete."""

    def record(self, *arguments: Any) -> None: ...

    def wait(self, *arguments: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class Stream:
    device = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Of the CPU: work is done as it is given."""

    def wait_stream(self, *arguments: Any) -> None: ...

    def wait_event(self, *arguments: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *arguments: Any) -> Event:
        return Event()


def give_streams(module: Any) -> None:
    module.Event, module.Stream = Event, Stream
    module.stream = lambda stream: contextlib.nullcontext()
    module.current_stream = lambda *arguments: Stream()


def register_nothing(module: Any) -> None:
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        if hasattr(module, name):
            setattr(module, name, lambda *arguments, **named: None)


def pin_nothing(module: Any) -> None:
    """Make torch allocate the buffers of LoRA adapters unpinned: torch raises on pinning without a device."""
    torch = module.torch
    torch.Tensor.pin_memory = lambda tensor, *arguments: tensor
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: make(*arguments, **named | {"pin_memory": False})


def copy_by_torch(module: Any) -> None:
    """Between a page-first host pool [K or V, token, layer, head, element] and the device pool's layers."""

    def backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
        host, device = host_indices.cpu(), device_indices.cpu()
        for layer in range(self.layer_num):
            self.kv_buffer[0, host, layer] = self.device_k_buffers[layer][device]
            self.kv_buffer[1, host, layer] = self.device_v_buffers[layer][device]

    def load(
        self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer: int, io_backend: str, *, is_draft: bool = False
    ) -> None:
        host, device = host_indices.cpu(), device_indices.cpu()
        self.device_k_buffers[layer][device] = self.kv_buffer[0, host, layer]
        self.device_v_buffers[layer][device] = self.kv_buffer[1, host, layer]

    module.MHATokenToKVPoolHost.backup_from_device_all_layer = backup
    module.MHATokenToKVPoolHost.load_to_device_per_layer = load


def give_events(module: Any) -> None:
    """Of CUDA, which a prefill engine records before it sends."""
    module.torch.cuda.Event = Event
    module.torch.cuda.current_stream = Stream


CHANGES: dict[str, Callable[[Any], None]] = {
    "torch.cpu": give_streams,
    COMMON: register_nothing,
    POOLS: copy_by_torch,
    ADAPTERS: pin_nothing,
    PREFILL: give_events,
}


class Changing(importlib.abc.MetaPathFinder):
    """Finds the modules of CHANGES where they are, and changes them once they are loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: types.ModuleType) -> None:
                load(module)
                CHANGES[name](module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Changing())
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
