"""Counters of the storage back end in SGLang's /metrics, which exports the process's prometheus_client registry."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from prometheus_client import Counter

LABELS = ("tp_rank", "pp_rank", "dp_rank")


class PageCounters:
    """Counters of one rank. They continue when a back end is attached again."""

    def __init__(self, tp_rank: int, pp_rank: int, dp_rank: int) -> None:
        labels = (str(tp_rank), str(pp_rank), str(dp_rank))
        self._of = {name: counter.labels(*labels) for name, counter in _counters().items()}

    def looked_up(self, asked: int, found: int) -> None:
        """Count pages of the primary pool that SGLang looked up, and those that can be restored."""
        self._of["asked"].inc(asked)
        self._of["found"].inc(found)

    def loaded(self, results: Mapping[str, Sequence[bool]]) -> None:
        self._moved("loaded", "load_failed", results)

    def stored(self, results: Mapping[str, Sequence[bool]]) -> None:
        self._moved("stored", "store_failed", results)

    def _moved(self, done: str, failed: str, results: Mapping[str, Sequence[bool]]) -> None:
        pages, succeeded = sum(map(len, results.values())), sum(map(sum, results.values()))
        self._of[done].inc(succeeded)
        self._of[failed].inc(pages - succeeded)


@cache
def _counters() -> Mapping[str, Any]:
    """Create the counters once per process: prometheus_client rejects duplicates."""
    helps = {
        "asked": "Pages that SGLang looked up in the store.",
        "found": "Pages of these that the store had, as prefixes that can be restored.",
        "loaded": "Pages read from the store, of all pools.",
        "load_failed": "Pages that were to be read from the store and could not be.",
        "stored": "Pages written to the store or there already, of all pools.",
        "store_failed": "Pages that were to be written to the store and were not.",
    }
    return {name: Counter(f"kvstore_pages_{name}", text, LABELS) for name, text in helps.items()}
