"""Traced requests that had copies made: for which of them an order is. Bounded, in memory only. The loop is the only caller."""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.rpc.tracing import TraceSpan

MAX_REQUESTS: Final = 32
"""The latest ones: what is ordered for those before is in no trace."""
TTL_NS: Final = 60_000_000_000
"""What is ordered later is for another reason, such as a node that died."""


class _Reason(NamedTuple):
    tenant: str
    keys: frozenset[bytes]
    span: TraceSpan
    until_ns: int


class CopyReasons:
    """See the module. Falsy where there are none."""

    def __init__(self) -> None:
        self._causes: deque[_Reason] = deque(maxlen=MAX_REQUESTS)

    def __bool__(self) -> bool:
        return bool(self._causes)

    def note(self, tenant: str, keys: Sequence[bytes], span: TraceSpan, now_ns: int) -> None:
        """That request wants copies of these blocks."""
        self._causes.append(_Reason(tenant, frozenset(keys), span, now_ns + TTL_NS))

    def of(self, tenant: str, keys: Sequence[bytes], now_ns: int) -> list[TraceSpan]:
        """The requests that an order for these blocks is for."""
        while self._causes and self._causes[0].until_ns <= now_ns:
            self._causes.popleft()
        return [cause.span for cause in self._causes if cause.tenant == tenant and not cause.keys.isdisjoint(keys)]
