"""Failures of the store in an engine's log: once when they begin and once when they are over, however many there are between."""

import logging
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded, Denied, KVStoreError, Unavailable

LOG: Final = logging.getLogger("vllm.kvstore")
"""Below vLLM's own logger, the only one that it shows."""


NO_ANSWER: Final = (Unavailable, DeadlineExceeded, Denied)
"""Errors of a store that does not answer or refuses its client: see engines/reachability.py."""


class Trouble:
    """With one kind of call. Threads may share it: at worst a line comes twice."""

    def __init__(self, what: str, consequence: str) -> None:
        self._what = what
        self._consequence = consequence
        self._failures = 0

    def saw(self, error: KVStoreError | None, *, is_store_away: bool = False) -> None:
        """How a call went; None: well. `is_store_away`: the engine's log says already that the store does not answer."""
        if is_store_away and isinstance(error, NO_ANSWER):
            return
        if error is not None:
            self._failures += 1
            if self._failures == 1:
                LOG.warning("kvstore: %s fails, %s: %s: %s", self._what, self._consequence, type(error).__name__, error)
        elif self._failures:
            LOG.warning("kvstore: %s works again, after %d failures", self._what, self._failures)
            self._failures = 0
