"""Weights of a running engine: which version they are, and whether blocks may be loaded and saved now. Sans-I/O."""

import logging

from kvstore.engines.weights.identity import WeightsIdentity

LOG = logging.getLogger("kvstore.engines")


class WeightsState:
    """Identity of one engine's weights, as the engine resets, names and resumes. All ranks make the same calls with the same nonces.

    A request keeps the `generation` that it started with; once that is not the current one, nothing of it is loaded or saved. Not
    thread-safe.
    """

    def __init__(self, started_from: WeightsIdentity, *, resets_keep_weights: bool = False, log: logging.Logger = LOG) -> None:
        """
        Args:
            started_from: identity of the files that the engine loaded.
            resets_keep_weights: a setting: the engine resets its caches for other reasons than new weights.
        """
        self._identity = started_from
        self._resets_keep_weights = resets_keep_weights
        self._log = log
        self._is_settled = True
        self._generation = 0

    @property
    def identity(self) -> WeightsIdentity:
        return self._identity

    @property
    def is_settled(self) -> bool:
        """Whether blocks may be loaded and saved: not between a reset and the resume after it."""
        return self._is_settled

    @property
    def generation(self) -> int:
        """Count of the changes of identity."""
        return self._generation

    def begin_update(self) -> None:
        """Note that the weights are about to change. Until `resume` nothing is loaded or saved."""
        self._is_settled = False

    def reset(self, nonce: str) -> None:
        """Note that the engine dropped its caches and named no version: its weights are a private version
        until one is named, and until `resume` nothing is loaded or saved. Nothing changes where resets keep the weights.

        Args:
            nonce: unique for each reset, equal on the engine's ranks. Raises InvalidArgument for one that is no version.
        """
        if not self._resets_keep_weights:
            self._is_settled = False
            self._become(self._identity.private(nonce))

    def name(self, version: str) -> None:
        """Note that the weights are now those that engines call `version`. Raises InvalidArgument, and nothing has changed."""
        self._become(self._identity.named(version))

    def from_files(self, loaded: WeightsIdentity) -> None:
        """Note that the engine loaded files."""
        self._become(loaded)

    def files_changed(self, nonce: str) -> None:
        """Note that files changed below the engine, which may have read them before or after: a private version."""
        self._log.warning("kvstore: the engine's checkpoint changed on the disk: nothing is shared until weights are loaded or named")
        self._become(self._identity.private(nonce))

    def resume(self) -> None:
        """Note that the weights are complete: blocks are loaded and saved under the current identity."""
        self._is_settled = True

    def _become(self, identity: WeightsIdentity) -> None:
        if identity != self._identity:
            self._identity = identity
            self._generation += 1
