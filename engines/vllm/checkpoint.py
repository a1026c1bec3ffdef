"""Identity of an engine's weights: a fingerprint of its checkpoint's files, and hashes of samples of its memory.

`WatchedCheckpoint` computes the fingerprint in a thread while the engine starts, then checks the files once a second.
`sample_weights` runs in each rank, before and after a call that may change weights.
"""

import dataclasses
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from kvstore.engines.vllm.counters import LOG
from kvstore.engines.weights.files import find_checkpoint, list_files
from kvstore.engines.weights.fingerprint import stamp
from kvstore.engines.weights.identity import WeightsIdentity, identify
from kvstore.protocol.errors import ConfigError, KVStoreError, typed

WATCH_S: Final = 1.0
"""Interval between checks of the files."""
START_S: Final = 30.0
"""Maximum time that an engine's start waits for the fingerprint. Until it is known nothing is loaded or saved."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files that an engine loads one model from."""

    model: str
    """Path or hub name."""
    hub_revision: str = ""
    hub_cache: Path | None = None
    name: str = ""
    """Model name for weights without a fingerprint; empty: `model`."""

    def identity(self, choice: str) -> WeightsIdentity:
        """Return the files' fingerprint, or the model's name if `choice` is `off` or no files are local. Raises
        ConfigError."""
        found = identify(self.model, choice, hub_revision=self.hub_revision, hub_cache=self.hub_cache, log=LOG)
        return found if choice != "off" and self.stamp() else self.named(found.base)

    def named(self, revision: str) -> WeightsIdentity:
        """Return an identity made of `revision` and the model's name."""
        return WeightsIdentity(f"{revision} of {(self.name or self.model).replace('@', '%40')}".strip())

    def stamp(self) -> bytes:
        """Return bytes that change when a file does; empty if no files are on this machine."""
        path = self._path()
        return stamp(path) if path is not None else b""

    def changed_ns(self) -> int:
        """Return when a file last changed; 0 if none is on this machine. Files of a hub's cache never change.

        Raises ConfigError: they cannot be read.
        """
        path = self._path()
        return max((file.ctime_ns for file in list_files(path) if not file.is_hub_link), default=0) if path is not None else 0

    def _path(self) -> Path | None:
        return find_checkpoint(self.model, revision=self.hub_revision, hub_cache=self.hub_cache)


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Everything that an engine loads its weights from."""

    files: tuple[WeightFiles, ...]
    """The model, and a draft model whose layers have caches. Empty: no files; `text` identifies the weights."""
    choice: str = "sampled"
    """The setting `fingerprint`."""
    revision: str = ""
    """The setting `revision`; it replaces the fingerprint, and no file is read."""
    text: str = ""

    def identity(self) -> WeightsIdentity:
        """Return the identity of the weights. Raises ConfigError: files cannot be read, or `revision` is invalid."""
        if self.revision:
            revision = identify("", "", revision=self.revision, log=LOG).base
            named = [files.named(revision).base for files in self.files]
            return WeightsIdentity(" draft ".join(named) or f"{revision} {self.text}")
        if not self.files:
            return WeightsIdentity(self.text)
        return WeightsIdentity(" draft ".join(files.identity(self.choice).base for files in self.files))

    def stamps(self) -> tuple[bytes, ...]:
        return tuple(files.stamp() for files in self.files)

    def changed_ns(self) -> int:
        return max((files.changed_ns() for files in self.files), default=0)

    def at(self, path: str | None) -> "WeightsSource":
        """Return the same source with the model's files at `path`; None: unchanged."""
        if path is None:
            return self
        return dataclasses.replace(self, files=(WeightFiles(path, name=self.files[0].name), *self.files[1:]))


class WatchedCheckpoint:
    """Computes and watches the identity of the files in a thread. Implements `variants.Checkpoint`; one other thread
    calls all methods."""

    def __init__(self, source: WeightsSource, *, loaded_since_ns: int, watch_s: float = WATCH_S) -> None:
        """Start the thread. `loaded_since_ns`: wall-clock time after which, and before this call, the engine read
        the files."""
        self._source = source
        self._loaded_since_ns = loaded_since_ns
        self._watch_s = watch_s
        self._stamps = source.stamps()
        self._identity: WeightsIdentity | None = None
        self._error: KVStoreError | None = None
        self._has_changed = False
        self._reloading: tuple[WeightsSource, tuple[bytes, ...]] | None = None
        self._is_done, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-weights", daemon=True)
        self._thread.start()

    def wait(self, deadline_s: float = START_S) -> None:
        """Wait until the identity is known, at most `deadline_s`. Raises ConfigError: it cannot be computed."""
        if not self._is_done.wait(deadline_s):
            LOG.warning(
                "kvstore: the fingerprint of the weights takes longer than %g s: nothing is loaded or saved until it is known", deadline_s
            )
        if self._error is not None:
            raise self._error

    def identity(self) -> WeightsIdentity | None:
        return self._identity

    def has_changed(self) -> bool:
        return self._has_changed

    def begin_reload(self, path: str | None) -> None:
        source = self._source.at(path)
        self._reloading = source, source.stamps()

    def end_reload(self) -> WeightsIdentity:
        assert self._reloading is not None, "begin_reload comes first"
        (source, stamps), self._reloading = self._reloading, None
        is_same = source == self._source and stamps == self._stamps and all(stamps)
        if self._source.revision and not is_same:
            raise ConfigError(f"revision {self._source.revision!r} names the files from before: change it with the weights")
        identity = self._identity if is_same and self._identity is not None else source.identity()
        if source.stamps() != stamps:
            raise ConfigError("the checkpoint's files changed while the engine loaded them")
        self._source, self._stamps, self._identity, self._has_changed = source, stamps, identity, False
        return identity

    def close(self) -> None:
        """Stop the thread after its current read. Does not wait."""
        self._is_closed.set()

    def _run(self) -> None:
        try:
            self._has_changed = self._source.changed_ns() > self._loaded_since_ns
            self._identity = self._source.identity()
        except Exception as error:
            self._error = typed(error)
            LOG.warning("kvstore: the engine's weights cannot be identified: nothing is loaded or saved: %s", error)
        self._is_done.set()
        while any(self._stamps) and not self._is_closed.wait(self._watch_s):
            stamps = self._stamps
            if _differ(stamps, self._source.stamps()) and stamps is self._stamps:
                self._has_changed = True


def _differ(before: tuple[bytes, ...], now: tuple[bytes, ...]) -> bool:
    """Return whether a file changed. A deleted file has not changed: the engine still has its contents."""
    return any(after and after != was for was, after in zip(before, now, strict=True))


SAMPLED_PARAMETERS: Final = 512
"""Spread evenly over a model's parameters."""
SAMPLE_ELEMENTS: Final = 16
"""Spread evenly over a parameter. A small training step (1e-6 of weights about 0.02) changes one bfloat16 element in
a hundred, so some of 8,192 differ."""


def sample_weights(worker: Any) -> str:
    """Return a hash of samples of a rank's weights, equal for equal weights. Runs in the rank, through vLLM's
    `collective_rpc`. Takes 6 ms for 700 parameters on a CPU."""
    runner = worker.model_runner
    models = [runner.get_model(), getattr(getattr(runner, "drafter", None), "model", None)]
    hasher = xxhash.xxh3_128()
    for model in models:
        if isinstance(model, torch.nn.Module):
            parameters = [parameter.detach() for parameter in model.parameters() if parameter.numel()]
            step = max(1, len(parameters) // SAMPLED_PARAMETERS)
            for parameter in parameters[::step]:
                flat = parameter.reshape(-1)
                sample = flat[:: max(1, len(flat) // SAMPLE_ELEMENTS)][:SAMPLE_ELEMENTS]
                hasher.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
