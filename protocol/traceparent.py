"""W3C traceparent: trace id and parent span id of a sampled request.

It travels in a Trace message, in gRPC metadata, and in an HTTP header. Requests that are not sampled have none.
Source: W3C Trace Context, https://www.w3.org/TR/trace-context/#traceparent-header.
"""

import re
from dataclasses import dataclass
from typing import Final

_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FIRST_VERSION: Final = "00"
_NO_VERSION: Final = "ff"
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Trace (128 bits) and span (64 bits) of a request's parent; neither is 0."""

    trace_id: int
    span_id: int

    def text(self) -> str:
        """Return the header value: version 00, sampled."""
        return f"{_FIRST_VERSION}-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED:02x}"


def parse_traceparent(text: str) -> TraceParent | None:
    """Parse a header value; None if it is malformed or not sampled.

    A malformed one does not fail the request that carries it.
    """
    match = _read(text)
    return _span(match) if match is not None and _has_sampled(match) else None


def is_sampled(text: str) -> bool | None:
    """Return True if the sender samples the trace, None for a malformed value."""
    match = _read(text)
    return _has_sampled(match) if match is not None else None


def _read(text: str) -> re.Match[str] | None:
    match = _FORM.fullmatch(text)
    if match is None or match[1] == _NO_VERSION or (match[1] == _FIRST_VERSION and match[5]):
        return None
    span = _span(match)
    return match if span.trace_id and span.span_id else None


def _span(match: re.Match[str]) -> TraceParent:
    return TraceParent(int(match[2], 16), int(match[3], 16))


def _has_sampled(match: re.Match[str]) -> bool:
    return bool(int(match[4], 16) & _SAMPLED)
