"""Weights of one engine over its life: the files that they came from, resets, updates, names, sleep.

The scheduler chooses the variant of each request, and ranks follow it with the metadata of the next step, so that ranks agree.
Data-parallel ranks have schedulers of their own: they share blocks by fingerprints and by names, never by private versions.
"""

import dataclasses
from collections.abc import Callable, Iterable
from logging import DEBUG, INFO
from typing import Final, Protocol

from kvstore.engines.vllm.adapters import Adapters, LoraRequest
from kvstore.engines.vllm.identity import Variant
from kvstore.engines.vllm.trouble import LOG
from kvstore.engines.weights.identity import WeightsIdentity
from kvstore.engines.weights.state import WeightsState
from kvstore.protocol.errors import ConfigError, KVStoreError

KEEPING_LEVEL: Final = 1
"""The deepest level of sleep after which the engine has the weights that it had before."""


class VariantRequest(Protocol):
    """The part of vLLM's `Request` that is used here."""

    @property
    def lora_request(self) -> LoraRequest | None: ...


class Checkpoint(Protocol):
    """Files that the engine's weights came from."""

    def identity(self) -> WeightsIdentity | None:
        """None while it is being computed. Raises ConfigError: it cannot be."""

    def has_changed(self) -> bool:
        """Whether the files are others than those of `identity`. Does not block."""

    def begin_reload(self, path: str | None) -> None:
        """The engine is about to load `path`; None: the files that it began with."""

    def end_reload(self) -> WeightsIdentity:
        """Return the identity of what the engine has loaded.

        Raises:
            ConfigError: the files cannot be read, or changed while the engine read them.
        """

    def close(self) -> None: ...


class Variants:
    """Used by one thread, that of the engine's scheduler."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        adapters: Adapters,
        *,
        nonce: Callable[[], str],
        on_change: Callable[[], None],
        resets_keep_weights: bool = False,
    ) -> None:
        """`nonce`: a text that no other call and no other process ever has. `on_change`: called after the identity changed."""
        self._checkpoint = checkpoint
        self._adapters = adapters
        self._nonce = nonce
        self._on_change = on_change
        self._resets_keep_weights = resets_keep_weights
        self._state = WeightsState(WeightsIdentity(""), log=LOG)
        self._is_known = False
        self._asleep: tuple[int, str] | None = None
        """Generation of the weights that the engine keeps while it sleeps, and what it sampled of them before."""

    @property
    def identity(self) -> WeightsIdentity | None:
        """None while it is unknown."""
        return self._state.identity if self._is_known else None

    @property
    def is_shared(self) -> bool:
        """Whether other engines can have weights of this identity."""
        return self._is_known and not self._state.identity.is_private

    def of(self, request: VariantRequest, now_s: float) -> Variant | None:
        """Variant that a request is computed by which begins now. None: nothing of it is to be loaded or saved."""
        if not self._is_known or not self._state.is_settled:
            return None
        lora = request.lora_request
        adapter = self._adapters.of(lora, now_s) if lora is not None else ""
        return Variant(self._state.identity.text, adapter) if adapter is not None else None

    def poll(self, adapters: Iterable[LoraRequest], now_s: float) -> None:
        """Called in each step, with the adapters of its requests: whether the fingerprint is known by now, and whether files changed below
        the engine."""
        if not self._is_known:
            self._learn()
        elif self._checkpoint.has_changed() and not self._state.identity.version:
            self._change(lambda: self._state.files_changed(self._nonce()))
        for adapter in adapters:
            self._adapters.of(adapter, now_s)

    def reset(self) -> None:
        """The engine drops its caches: its weights change, or have changed, or neither. Until `resumed` no request begins."""
        if self._asleep is None and not self._resets_keep_weights:
            self._change(lambda: self._state.reset(self._nonce()))

    def changing(self) -> None:
        """The engine changes its weights in memory, or has changed them."""
        was_settled = self._state.is_settled
        self._change(lambda: self._state.reset(self._nonce()))
        if was_settled:
            self._state.resume()

    def reloading(self, path: str | None) -> None:
        """The engine is about to load its weights from files; see `Checkpoint.begin_reload`."""
        self._checkpoint.begin_reload(path)
        self.changing()

    def reloaded(self) -> None:
        """It has loaded them."""
        try:
            identity = self._checkpoint.end_reload()
        except ConfigError as error:
            LOG.warning("kvstore: the engine's weights are known to no other engine until they are named: %s", error)
            return
        self._is_known = True
        self._change(lambda: self._state.from_files(identity))

    def named(self, version: str) -> None:
        """The engine calls its weights `version`. A name that cannot be one is reported, and changes nothing."""
        try:
            self._change(lambda: self._state.name(version))
        except KVStoreError as error:
            LOG.warning("kvstore: the engine's weights keep their identity: %s", error)

    def sleeping(self, level: int, sample: str | None) -> None:
        """The engine is about to reset its caches and sleep. `sample` is taken of its weights; None: none could be."""
        if level > KEEPING_LEVEL or sample is None:
            self.changing()
        self._asleep = (self._state.generation, sample) if level == KEEPING_LEVEL and sample is not None else None

    def awake(self, sample: str | None) -> None:
        """The engine has all of its memory again, or did not fall asleep. It has the weights from before if their samples are equal."""
        if self._asleep is not None and self._asleep[0] == self._state.generation and sample != self._asleep[1]:
            self.changing()
        self._asleep = None

    @property
    def keeps_asleep(self) -> bool:
        """Whether `awake` will compare the weights with those from before the sleep."""
        return self._asleep is not None

    def adapter_added(self, request: LoraRequest, now_s: float) -> None:
        """See `Adapters.added`."""
        self._adapters.added(request, now_s)

    def adapter_removed(self, lora_int_id: int) -> None:
        """See `Adapters.removed`."""
        self._adapters.removed(lora_int_id)

    def close(self) -> None:
        """Look at no files any more."""
        self._checkpoint.close()

    def resumed(self) -> None:
        """The engine schedules requests again."""
        self._state.resume()

    def _learn(self) -> None:
        """The version that was named meanwhile, or the private one, stays."""
        identity = self._checkpoint.identity()
        if identity is not None:
            self._is_known = True
            known = dataclasses.replace(identity, version=self._state.identity.version)
            self._change(lambda: self._state.from_files(known))

    def _change(self, change: Callable[[], None]) -> None:
        before, was_private = self._state.generation, self._state.identity.is_private
        change()
        if self._state.generation != before:
            if self._is_known:
                identity = self._state.identity
                LOG.log(DEBUG if was_private and identity.is_private else INFO, "kvstore: the engine's weights are %s", identity.text)
            self._on_change()
