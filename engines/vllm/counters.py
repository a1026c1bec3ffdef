"""Counters for vLLM's metrics, and failures of the store in vLLM's log.

Counters are sums since they were last read and add up over ranks and steps. A failure is logged when it begins and when
it ends, however many calls fail in between.
"""

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from kvstore.protocol.errors import DeadlineExceeded, Denied, KVStoreError, Unavailable


def count(help: str, default: float = 0) -> Any:
    """Return a dataclass field with its help text for vLLM's /metrics."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(slots=True)
class ConnectorCounters:
    """Sums since the last `take`. Requests and their tokens count once, when vLLM first admits the request; blocks
    and bytes count each time."""

    lookups: int = count("Lookup messages to the store, each for all waiting requests that were due.")
    lookup_s: float = count("Seconds that the scheduler waited for lookups.", 0.0)
    requests: int = count("Requests admitted after a lookup.")
    queried_tokens: int = count("Prompt tokens looked up: those of full blocks that the engine did not have.")
    found_tokens: int = count("Prompt tokens that the store had. Divide by queried tokens for the lookup hit ratio.")
    loaded_tokens: int = count("Prompt tokens loaded instead of computed. Divide by queried tokens for the hit ratio.")
    loaded_blocks: int = count("Blocks loaded, of all ranks and groups of layers.")
    loaded_bytes: int = count("Bytes of the blocks loaded.")
    load_s: float = count("Seconds that loader threads took.", 0.0)
    failed_blocks: int = count("Blocks found but not loaded: evicted since, late or damaged. The engine computes them.")
    saved_blocks: int = count("Blocks stored, without those that the store had.")
    saved_bytes: int = count("Bytes of the blocks stored.")
    save_s: float = count("Seconds from the copy of blocks to the end of their store.", 0.0)
    hinted_requests: int = count("Requests with retention hints that were taken.")
    malformed_hints: int = count("Requests with malformed retention hints, which were ignored.")
    dropped_blocks: int = count("Blocks not stored: the write-behind memory was full, or the store did not take them in time.")

    def values(self) -> dict[str, int | float]:
        """Return the counters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add(self, other: "ConnectorCounters") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def take(self) -> "ConnectorCounters":
        """Return the sums so far and reset them to 0."""
        taken = replace(self)
        for field in fields(self):
            setattr(self, field.name, field.default)
        return taken


def metrics() -> Iterator[tuple[str, str, str]]:
    """Yield each counter's field name, Prometheus name and help. Prometheus clients append `_total`."""
    for field in fields(ConnectorCounters):
        unit_named = f"{field.name.removesuffix('_s')}_seconds" if field.name.endswith("_s") else field.name
        yield field.name, f"vllm:kvstore_{unit_named}", field.metadata["help"]


LOG: Final = logging.getLogger("vllm.kvstore")
"""Child of vLLM's own logger; vLLM does not configure others."""


NO_ANSWER: Final = (Unavailable, DeadlineExceeded, Denied)
"""Errors of an unreachable store, or of one that rejects the client: see engines/reachability.py."""


class FailureLog:
    """Logs when one kind of call starts to fail and when it recovers. Threads may share it; a line may then appear
    twice."""

    def __init__(self, what: str, consequence: str) -> None:
        self._what = what
        self._consequence = consequence
        self._failures = 0

    def record(self, error: KVStoreError | None, *, is_store_unreachable: bool = False) -> None:
        """Record a call's outcome; None: success. `is_store_unreachable`: the engine's log already reports the store as
        unreachable."""
        if is_store_unreachable and isinstance(error, NO_ANSWER):
            return
        if error is not None:
            self._failures += 1
            if self._failures == 1:
                LOG.warning("kvstore: %s fails, %s: %s: %s", self._what, self._consequence, type(error).__name__, error)
        elif self._failures:
            LOG.warning("kvstore: %s works again, after %d failures", self._what, self._failures)
            self._failures = 0
