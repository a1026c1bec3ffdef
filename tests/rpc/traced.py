"""A tracer that notes the spans which have ended, and a call that is sampled."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc.tracing import CALL, SampledCall

PLACE: Final = TraceParent(3, 5)
"""Traceparent of a span without one of its own."""


@dataclass
class Part:
    """Of a span, or of a part."""

    spans: "Spans"
    name: str
    attributes: dict[str, int | str] = field(default_factory=dict)
    place: TraceParent = PLACE

    def begin(self, name: str) -> "Part":
        return Part(self.spans, name)

    def follow(self, name: str) -> "Part":
        return Part(self.spans, name)

    def set(self, name: str, value: int | str) -> None:
        self.attributes[name] = value

    def end(self, error: str = "") -> None:
        self.spans.parts.append((self.name, self.attributes))


@dataclass
class Request(Part):
    """A span of a request."""

    kind: int = 0
    parent: TraceParent = PLACE
    links: Sequence[TraceParent] = ()

    def end(self, error: str = "") -> None:
        self.spans.told.append((self.kind, self.parent, error))
        self.spans.linked.append(tuple(self.links))


@dataclass
class Spans:
    """Type, parent and error of each request whose span has ended; name and attributes of each of their parts that has."""

    told: list[tuple[int, TraceParent, str]] = field(default_factory=list)
    parts: list[tuple[str, dict[str, int | str]]] = field(default_factory=list)
    linked: list[tuple[TraceParent, ...]] = field(default_factory=list)
    """Links of each request's span."""

    def begin(self, kind: int, parent: TraceParent, links: Sequence[TraceParent] = ()) -> Request:
        return Request(self, "", kind=kind, parent=parent, links=links)


@contextmanager
def sampled() -> Iterator[SampledCall]:
    """Make this thread's requests inside the block part of a trace."""
    call = SampledCall(TraceParent(7, 11))
    token = CALL.set(call)
    try:
        yield call
    finally:
        CALL.reset(token)
