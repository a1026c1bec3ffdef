"""Identity of one engine's weights and LoRAs over its life: files, resets, updates, names, sleep.

**Weights.** The scheduler assigns a variant to each request, and ranks follow it through the next step's metadata, so
all ranks agree. Data-parallel ranks have separate schedulers: they share blocks by fingerprints and by names, never by
private versions.

**LoRAs** are identified by the fingerprint of their files; vLLM knows them by an id. It reads the files when a request
first needs them, when a call loads them in place, and again after it evicted the adapter. If files change below a live
id, the adapter's weights are unknown: its requests are neither loaded nor saved.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import DEBUG, INFO
from typing import Final, Protocol

from kvstore.engines.vllm.counters import LOG
from kvstore.engines.vllm.identity import Variant
from kvstore.engines.weights.identity import WeightsIdentity, WeightsState
from kvstore.protocol.errors import ConfigError, KVStoreError

KEEPING_LEVEL: Final = 1
"""Deepest sleep level that keeps the weights."""
CHECK_S: Final = 0.1
"""Shortest interval between checks of an adapter's files: a few stat calls, in the scheduler's thread."""
MAX_ADAPTERS: Final = 4096
"""The oldest are forgotten first, and read again when a request uses them."""
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
        """Layout of expert weights in a file."""


class AdapterFiles(Protocol):
    """Reads an adapter's files by the path that vLLM was given."""

    def fingerprint(self, path: str) -> str:
        """Return the fingerprint of the files. Raises ConfigError: there are no weight files, or one cannot be read."""

    def stamp(self, path: str) -> bytes:
        """Return bytes that change when a file changes. Empty: no files."""


@dataclass(slots=True)
class _Loaded:
    """Adapter that the engine has loaded."""

    path: str
    stamp: bytes
    fingerprint: str | None
    """None: unknown."""
    next_check_s: float


class Adapters:
    """Fingerprints of an engine's LoRAs. One thread calls it; `now_s` is of any monotonic clock."""

    def __init__(self, files: AdapterFiles, on_change: Callable[[], None]) -> None:
        """Create it. `on_change` is called after an adapter's weights changed or became unknown."""
        self._files = files
        self._on_change = on_change
        self._loaded: dict[int, _Loaded] = {}

    def of(self, request: LoraRequest, now_s: float) -> str | None:
        """Return text that identifies the adapter's weights; None if they are unknown. Reads the files of a new
        adapter."""
        loaded = self._loaded.get(request.lora_int_id)
        if loaded is None:
            loaded = self._read(request, now_s)
        elif loaded.path != request.lora_path:
            self._mark_unknown(loaded, f"an adapter of its id {request.lora_int_id} was loaded from {loaded.path}")
        elif now_s >= loaded.next_check_s:
            loaded = self._check(request, loaded, now_s)
        if loaded.fingerprint is None:
            return None
        return f"{loaded.fingerprint} 3d" if request.is_3d_lora_weight else loaded.fingerprint

    def added(self, request: LoraRequest, now_s: float) -> None:
        """The engine loaded this adapter on request. vLLM reads the files of a known one only for `load_inplace`."""
        before = self._loaded.get(request.lora_int_id)
        if before is None or request.load_inplace:
            loaded = self._read(request, now_s)
            if before is not None and before.fingerprint != loaded.fingerprint:
                self._on_change()

    def removed(self, lora_int_id: int) -> None:
        """The engine dropped this adapter: its files are read again if it returns."""
        self._loaded.pop(lora_int_id, None)

    def _check(self, request: LoraRequest, loaded: _Loaded, now_s: float) -> _Loaded:
        loaded.next_check_s = now_s + CHECK_S
        stamp = self._files.stamp(loaded.path)
        if stamp == loaded.stamp:
            return loaded
        if not loaded.stamp:  # the engine has downloaded it from a hub since
            return self._read(request, now_s)
        self._mark_unknown(loaded, "its files changed after the engine loaded it")
        return loaded

    def _mark_unknown(self, loaded: _Loaded, why: str) -> None:
        if loaded.fingerprint is not None:
            loaded.fingerprint = None
            LOG.warning("kvstore: requests with the LoRA %s are neither loaded nor saved %s: %s", loaded.path, REMEDY, why)
            self._on_change()

    def _read(self, request: LoraRequest, now_s: float) -> _Loaded:
        path = request.lora_path
        stamp = self._files.stamp(path)  # before the bytes are read: the next check notices a change meanwhile
        fingerprint = None
        try:
            fingerprint = self._files.fingerprint(path)
        except ConfigError as error:
            LOG.warning("kvstore: requests with the LoRA %s are neither loaded nor saved: %s", path, error)
        loaded = self._loaded[request.lora_int_id] = _Loaded(path, stamp, fingerprint, now_s + CHECK_S)
        if len(self._loaded) > MAX_ADAPTERS:
            del self._loaded[next(iter(self._loaded))]
        return loaded


class VariantRequest(Protocol):
    """The part of vLLM's `Request` that is used here."""

    @property
    def lora_request(self) -> LoraRequest | None: ...


class Checkpoint(Protocol):
    """Files that the engine loaded its weights from."""

    def identity(self) -> WeightsIdentity | None:
        """Return the identity; None while it is being computed. Raises ConfigError: it cannot be computed."""

    def has_changed(self) -> bool:
        """Return whether the files changed since `identity`. Does not block."""

    def begin_reload(self, path: str | None) -> None:
        """The engine is about to load `path`; None: its original files."""

    def end_reload(self) -> WeightsIdentity:
        """Return the identity of the weights that the engine loaded.

        Raises:
            ConfigError: the files cannot be read, or changed while the engine read them.
        """

    def close(self) -> None: ...


class Variants:
    """Identity of the weights and adapter of each new request. The scheduler's thread calls it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        adapters: Adapters,
        *,
        nonce: Callable[[], str],
        on_change: Callable[[], None],
        resets_keep_weights: bool = False,
    ) -> None:
        """Create it with unknown weights.

        Args:
            nonce: returns a text that is unique over calls and processes.
            on_change: called after the identity changed.
            resets_keep_weights: a reset of the engine's caches does not mean new weights.
        """
        self._checkpoint = checkpoint
        self._adapters = adapters
        self._nonce = nonce
        self._on_change = on_change
        self._resets_keep_weights = resets_keep_weights
        self._state = WeightsState(WeightsIdentity(""))
        self._is_known = False
        self._asleep: tuple[int, str] | None = None
        """While the engine sleeps with its weights: their generation, and a sample of them."""

    @property
    def identity(self) -> WeightsIdentity | None:
        """Identity of the weights; None while it is unknown."""
        return self._state.identity if self._is_known else None

    @property
    def is_shared(self) -> bool:
        """True if other engines can have weights of this identity."""
        return self._is_known and not self._state.identity.is_private

    def of(self, request: VariantRequest, now_s: float) -> Variant | None:
        """Return the variant of a request that begins now. None: nothing of it is loaded or saved."""
        if not self._is_known or not self._state.is_settled:
            return None
        lora = request.lora_request
        adapter = self._adapters.of(lora, now_s) if lora is not None else ""
        return Variant(self._state.identity.text, adapter) if adapter is not None else None

    def poll(self, adapters: Iterable[LoraRequest], now_s: float) -> None:
        """Check in each step for the fingerprint, and for changed files of the weights and of the step's `adapters`."""
        if not self._is_known:
            self._take_identity()
        elif self._checkpoint.has_changed() and not self._state.identity.version:
            LOG.warning("kvstore: the engine's checkpoint changed on disk: nothing is shared until weights are reloaded or named")
            self._change(lambda: self._state.become(self._state.identity.private(self._nonce())))
        for adapter in adapters:
            self._adapters.of(adapter, now_s)

    def reset(self) -> None:
        """The engine drops its caches, because its weights may change or have changed. No request begins until
        `resumed`."""
        if self._asleep is None and not self._resets_keep_weights:
            self._change(lambda: self._state.reset(self._nonce()))

    def changing(self) -> None:
        """The engine is changing its weights in memory, or has changed them."""
        was_settled = self._state.is_settled
        self._change(lambda: self._state.reset(self._nonce()))
        if was_settled:
            self._state.resume()

    def reloading(self, path: str | None) -> None:
        """The engine is about to load its weights from files; see `Checkpoint.begin_reload`."""
        self._checkpoint.begin_reload(path)
        self.changing()

    def reloaded(self) -> None:
        """The engine has loaded its weights from files."""
        try:
            identity = self._checkpoint.end_reload()
        except ConfigError as error:
            LOG.warning("kvstore: the engine's blocks are not shared until its weights are named: %s", error)
            return
        self._is_known = True
        self._change(lambda: self._state.become(identity))

    def named(self, version: str) -> None:
        """The engine named its weights `version`. An invalid name is logged and changes nothing."""
        try:
            self._change(lambda: self._state.name(version))
        except KVStoreError as error:
            LOG.warning("kvstore: the engine's weights keep their identity: %s", error)

    def sleeping(self, level: int, sample: str | None) -> None:
        """The engine is about to reset its caches and sleep. `sample` is of its weights; None: they could not be
        sampled."""
        if level > KEEPING_LEVEL or sample is None:
            self.changing()
        self._asleep = (self._state.generation, sample) if level == KEEPING_LEVEL and sample is not None else None

    def awake(self, sample: str | None) -> None:
        """The engine has its memory again, or did not fall asleep. Its weights are those from before if the samples
        are equal."""
        if self._asleep is not None and self._asleep[0] == self._state.generation and sample != self._asleep[1]:
            self.changing()
        self._asleep = None

    @property
    def compares_on_wake(self) -> bool:
        """True if `awake` will compare samples of the weights from before and after the sleep."""
        return self._asleep is not None

    def adapter_added(self, request: LoraRequest, now_s: float) -> None:
        """See `Adapters.added`."""
        self._adapters.added(request, now_s)

    def adapter_removed(self, lora_int_id: int) -> None:
        """See `Adapters.removed`."""
        self._adapters.removed(lora_int_id)

    def close(self) -> None:
        """Stop watching files."""
        self._checkpoint.close()

    def resumed(self) -> None:
        """The engine schedules requests again."""
        self._state.resume()

    def _take_identity(self) -> None:
        """Take the checkpoint's identity once it is computed. A version that was named or made private meanwhile
        stays."""
        identity = self._checkpoint.identity()
        if identity is not None:
            self._is_known = True
            known = dataclasses.replace(identity, version=self._state.identity.version)
            self._change(lambda: self._state.become(known))

    def _change(self, change: Callable[[], None]) -> None:
        before, was_private = self._state.generation, self._state.identity.is_private
        change()
        if self._state.generation != before:
            if self._is_known:
                identity = self._state.identity
                LOG.log(DEBUG if was_private and identity.is_private else INFO, "kvstore: the engine's weights are %s", identity.text)
            self._on_change()
