"""LoRAs of an engine by their contents: the fingerprint of each, and whether its files are still those that the engine loaded.

vLLM knows an adapter by an id. It reads the files when a request first needs them, when a call loads them in place, and again after
it evicted the adapter. Files that change below a live id make its weights unknown: a request with it is neither loaded nor saved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.engines.vllm.trouble import LOG
from kvstore.protocol.errors import ConfigError

CHECK_S: Final = 0.1
"""Files of an adapter are looked at no more often: a few stat calls, in the scheduler's thread."""
MAX_ADAPTERS: Final = 4096
"""The oldest are forgotten first, and read again when they are met."""
REMEDY: Final = "until it is loaded in place, or under another id"


class LoraRequest(Protocol):
    """The part of vLLM's `LoRARequest` that is used here."""

    @property
    def lora_int_id(self) -> int: ...

    @property
    def lora_path(self) -> str: ...

    @property
    def load_inplace(self) -> bool: ...

    @property
    def is_3d_lora_weight(self) -> bool:
        """Layout of the weights of experts in a file."""


class AdapterFiles(Protocol):
    """Reads the files of an adapter by the path that vLLM was given."""

    def fingerprint(self, path: str) -> str:
        """Raises ConfigError: there are no weight files, or one cannot be read."""

    def stamp(self, path: str) -> bytes:
        """Bytes that change when a file changes. Empty: no files are there."""


@dataclass(slots=True)
class _Loaded:
    path: str
    stamp: bytes
    fingerprint: str | None
    """None: unknown."""
    next_check_s: float


class Adapters:
    """Used by one thread. `now_s` is of any clock that goes forwards."""

    def __init__(self, files: AdapterFiles, on_change: Callable[[], None]) -> None:
        """`on_change` is called after the weights of an adapter changed or became unknown."""
        self._files = files
        self._on_change = on_change
        self._loaded: dict[int, _Loaded] = {}

    def of(self, request: LoraRequest, now_s: float) -> str | None:
        """Text that identifies the adapter's weights; None if they are unknown. Reads an adapter that is new."""
        loaded = self._loaded.get(request.lora_int_id)
        if loaded is None:
            loaded = self._read(request, now_s)
        elif loaded.path != request.lora_path:
            self._lose(loaded, f"an adapter of its id {request.lora_int_id} was loaded from {loaded.path}")
        elif now_s >= loaded.next_check_s:
            loaded = self._check(request, loaded, now_s)
        if loaded.fingerprint is None:
            return None
        return f"{loaded.fingerprint} 3d" if request.is_3d_lora_weight else loaded.fingerprint

    def added(self, request: LoraRequest, now_s: float) -> None:
        """A call had the engine load this adapter. vLLM reads the files of a known one only for `load_inplace`."""
        before = self._loaded.get(request.lora_int_id)
        if before is None or request.load_inplace:
            loaded = self._read(request, now_s)
            if before is not None and before.fingerprint != loaded.fingerprint:
                self._on_change()

    def removed(self, lora_int_id: int) -> None:
        """The engine dropped this adapter: its files are read again if it comes back."""
        self._loaded.pop(lora_int_id, None)

    def _check(self, request: LoraRequest, loaded: _Loaded, now_s: float) -> _Loaded:
        loaded.next_check_s = now_s + CHECK_S
        stamp = self._files.stamp(loaded.path)
        if stamp == loaded.stamp:
            return loaded
        if not loaded.stamp:  # a hub's, which the engine has fetched since
            return self._read(request, now_s)
        self._lose(loaded, "its files changed after the engine loaded it")
        return loaded

    def _lose(self, loaded: _Loaded, why: str) -> None:
        if loaded.fingerprint is not None:
            loaded.fingerprint = None
            LOG.warning("kvstore: requests with the LoRA %s are neither loaded nor saved %s: %s", loaded.path, REMEDY, why)
            self._on_change()

    def _read(self, request: LoraRequest, now_s: float) -> _Loaded:
        path = request.lora_path
        stamp = self._files.stamp(path)  # before its bytes: what changes meanwhile is noticed by the next check
        fingerprint = None
        try:
            fingerprint = self._files.fingerprint(path)
        except ConfigError as error:
            LOG.warning("kvstore: requests with the LoRA %s are neither loaded nor saved: %s", path, error)
        loaded = self._loaded[request.lora_int_id] = _Loaded(path, stamp, fingerprint, now_s + CHECK_S)
        if len(self._loaded) > MAX_ADAPTERS:
            del self._loaded[next(iter(self._loaded))]
        return loaded
