"""Traced requests that caused copies, so that copy orders are added to their traces. Bounded, in memory only. The
loop is the only caller."""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.rpc.tracing import TraceSpan

MAX_REQUESTS: Final = 32
"""Latest traced requests that are kept."""
TTL_NS: Final = 60_000_000_000
"""Later copies have another cause, such as a dead node."""


class _Reason(NamedTuple):
    tenant: str
    keys: frozenset[bytes]
    span: TraceSpan
    until_ns: int


class CopyReasons:
    """Traced requests by tenant and keys. Falsy if empty."""

    def __init__(self) -> None:
        self._causes: deque[_Reason] = deque(maxlen=MAX_REQUESTS)

    def __bool__(self) -> bool:
        return bool(self._causes)

    def note(self, tenant: str, keys: Sequence[bytes], span: TraceSpan, now_ns: int) -> None:
        """Record that the request wants copies of these blocks."""
        self._causes.append(_Reason(tenant, frozenset(keys), span, now_ns + TTL_NS))

    def of(self, tenant: str, keys: Sequence[bytes], now_ns: int) -> list[TraceSpan]:
        """Return the spans of requests that caused an order for these blocks."""
        while self._causes and self._causes[0].until_ns <= now_ns:
            self._causes.popleft()
        return [cause.span for cause in self._causes if cause.tenant == tenant and not cause.keys.isdisjoint(keys)]
