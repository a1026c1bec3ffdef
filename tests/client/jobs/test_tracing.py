"""Jobs are children of the span in which they were submitted, on any thread or task."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider

from kvstore.client import Client
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.jobs import Jobs
from kvstore.telemetry.tracing.config import TracingSettings
from tests.telemetry.tracing.collector import Collector, collecting

ENGINE = TracerProvider(shutdown_on_exit=False).get_tracer("engine")
SETTINGS = JobSettings(read_workers=1, lookup_deadline_s=60)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def all_to(collector: Collector) -> TracingSettings:
    return TracingSettings(endpoint=collector.endpoint, sample_ratio=1)


def check(collector: Collector, steps: list[str]) -> None:
    """Of each step of the engine's there is one lookup, and one that is within none."""
    parents = [span.parent_id for span in collector.named("kvstore.exists_batch", len(steps) + 1)]
    assert sorted(parents) == sorted([*steps, ""])


def test_of_threads(address: str, collector: Collector) -> None:
    steps = []
    with Client(address, tracing=all_to(collector)) as client, Jobs(client, SETTINGS) as jobs:
        for number in range(3):
            with ENGINE.start_as_current_span("step") as step:
                assert jobs.lookup([b"%d" % number]).wait(60)
                steps.append(f"{step.get_span_context().span_id:016x}")
        assert jobs.lookup([b"none"]).wait(60)
    check(collector, steps)
