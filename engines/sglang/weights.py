"""State machine of the weights of this process's SGLang engine. Imports neither SGLang nor the client.

    updated          the weights change: nothing is loaded or saved, the version is private
    recorded         the update succeeded: identity of the files, the version that the caller named, or still private
    flushed          SGLang dropped all pages of the old weights: pages are loaded and saved under the new identity

SGLang may update without a flush and then serve pages of both weights: nothing is loaded or saved until the next flush.
All ranks of an engine see the same calls in the same order, so they compute the same private versions without messages.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.engines.weights.identity import WeightsIdentity, WeightsState
from kvstore.protocol.errors import ConfigError, InvalidArgument


@dataclass(frozen=True, slots=True)
class StartWeights:
    """Weights that an engine started from."""

    target: WeightsIdentity
    draft: str
    """Identity of the draft model; empty without one."""
    nonce: str
    """Random; equal on the engine's ranks."""
    identify: Callable[[str], WeightsIdentity | None]
    """Return the identity of the files at a path; None if the settings identify the weights otherwise."""


@dataclass(frozen=True, slots=True)
class CurrentWeights:
    """Weights that pages are stored under now."""

    target: WeightsIdentity
    draft: str
    generation: int


class EngineWeights:
    """Weights of the engine in this process. SGLang's scheduler thread calls it; any thread may read `current`."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._started: StartWeights | None = None
        self._state = WeightsState(WeightsIdentity(""))
        self._draft = ""
        self._updates = 0
        self._is_open = False
        """True from the start of an update until its end is recorded."""
        self._loaded_from = ""
        self._is_session = False
        self._session_version = ""
        self._is_clean: Callable[[], bool] = lambda: False
        self.current: CurrentWeights | None = None
        """None while nothing may be loaded or saved."""

    @property
    def identity(self) -> WeightsIdentity:
        return self._state.identity

    def start(self, started: StartWeights) -> None:
        """Set the start weights. If the weights changed since an earlier call, their identity stays."""
        self._started = started
        if self._updates == 0:
            self._state = WeightsState(started.target)
            self._draft = started.draft
        self._publish()

    def begin_session(self) -> None:
        """Begin a session: the following updates make one version."""
        self._is_session, self._session_version = True, ""
        self.updated()

    def end_session(self) -> None:
        """End the session: its updates are complete."""
        self._is_session = False
        self._settle()

    def updated(self) -> None:
        """Mark the weights as changing."""
        self._state.begin_update()
        self._loaded_from = ""
        if not self._is_open:
            self._is_open = True
            self._become_private()
        self._publish()

    def loaded(self, path: str) -> None:
        """Record that the last update read all weights from the files at `path`."""
        self._loaded_from = path

    def recorded(self, version: str | None, is_clean: Callable[[], bool]) -> None:
        """Record that an update succeeded, or that the weights got a new name without an update.

        Args:
            version: name that the caller gave the weights, if any.
            is_clean: returns whether the engine has no pages and no running requests, so that no flush is needed.
        """
        if not self._is_open and version is None:
            self.updated()
        self._is_clean = is_clean
        before = self._state.identity
        if not self._loaded_from or not self._become_files(self._loaded_from):
            self._become_named(version)
        self._is_open, self._loaded_from = False, ""
        if self._state.identity != before:
            self._state.begin_update()
        self._settle()

    def flushed(self) -> None:
        """Record that SGLang dropped all pages."""
        if not self._is_session and not self._state.is_settled:
            self._is_open = False
            self._resume()

    def clear(self) -> None:
        """Begin a private version without pages. The weights do not change."""
        was_settled = self._state.is_settled
        self._become_private()
        if was_settled:
            self._state.resume()
        self._log.warning(
            "kvstore: the store is shared and was not cleared: this engine uses the new private version %s, which has no pages, "
            "until its weights are named or loaded from files",
            self._state.identity.text,
        )
        self._publish()

    def _settle(self) -> None:
        if not self._is_session and not self._state.is_settled and self._is_clean():
            self._resume()
        self._publish()

    def _resume(self) -> None:
        self._state.resume()
        self._log.info("kvstore: pages are loaded and saved under the weights %s", self._state.identity.text)
        self._publish()

    def _become_private(self) -> None:
        self._updates += 1
        nonce = self._started.nonce if self._started is not None else "unknown"
        self._state.reset(f"{nonce}-{self._updates}")

    def _become_files(self, path: str) -> bool:
        try:
            identity = self._started.identify(path) if self._started is not None else None
        except ConfigError as error:
            self._log.warning("kvstore: the weights at %s have no fingerprint: %s", path, error)
            identity = None
        if identity is None:
            return False
        self._state.become(identity)
        self._draft = self._draft and identity.text
        return True

    def _become_named(self, version: str | None) -> None:
        if version and self._is_session:
            self._session_version = version
        name = version or (self._session_version if self._is_session else "")
        try:
            if name:
                self._state.name(name)
        except InvalidArgument as error:
            self._log.warning("kvstore: the weights stay a private version: %s", error)

    def _publish(self) -> None:
        state = self._state
        is_used = self._started is not None and state.is_settled
        self.current = CurrentWeights(state.identity, self._draft, state.generation) if is_used else None
