"""What a router did so far: the JSON of /stats. Of one event loop."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from kvstore.telemetry.metrics.histogram import ANSWER_BOUNDS_S, Histogram


@dataclass(slots=True)
class Counters:
    """Counts since the start, but `active`, which is what is being served now."""

    active: int = 0
    requests: int = 0
    completed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """By the scheduler's reason; `busy` is the router's own limit."""
    failed: int = 0
    """For want of an engine or a master, or by their failure."""
    hung_up: int = 0
    """By clients, before the end."""
    retries: int = 0
    routed_by_load: Counter[str] = field(default_factory=Counter)
    """By why the prompt was not tokenised exactly."""
    token_mismatches: int = 0
    """Answers whose usage.prompt_tokens was not what /tokenize gave."""
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    """Of these, not computed: as engines say, or else as was foreseen."""
    output_tokens: int = 0
    durations: Histogram = field(default_factory=lambda: Histogram(ANSWER_BOUNDS_S))
    """Of requests that were taken on, to whichever end."""
    first_tokens: Histogram = field(default_factory=lambda: Histogram(ANSWER_BOUNDS_S))
    """Of streamed answers, from the request to their first part."""

    def as_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.type is int}
        return values | {"rejected": dict(self.rejected), "routed_by_load": dict(self.routed_by_load)}
