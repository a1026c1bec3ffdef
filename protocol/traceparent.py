"""The parent of a span as W3C Trace Context writes it: which trace a request belongs to, and which span of it asks.

It travels in a Trace message, as metadata of a gRPC call, and in a header of HTTP. Only of what is sampled: for all else nothing is sent.
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
    """`trace_id` has 128 bits, `span_id` 64; neither is 0."""

    trace_id: int
    span_id: int

    def text(self) -> str:
        """As version 00, sampled."""
        return f"{_FIRST_VERSION}-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED:02x}"


def parse_traceparent(text: str) -> TraceParent | None:
    """None for what is no traceparent, and for one that is not sampled: a bad one is worth no error to the request that it came with."""
    match = _read(text)
    return _span(match) if match is not None and _has_sampled(match) else None


def is_sampled(text: str) -> bool | None:
    """Whether who wrote it has its trace recorded; None: it is no traceparent."""
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
