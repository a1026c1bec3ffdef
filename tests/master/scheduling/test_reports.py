"""Tests of reports.py."""

from typing import Any

import pytest

from kvstore.master.scheduling.estimators import MAX_BATCH, MAX_SAMPLES, MAX_SEEN, check_report, samples_of
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.regression import DecodeSample, PrefillSample
from tests.master.scheduling.reports import decode, prefill


def test_a_plausible_report_is_taken() -> None:
    check_report(prefill(queue_s=1.5, send_bytes_per_s=1e9, seen_request_ids=[1, 2]))
    check_report(prefill(send_bytes_per_s=1.0))
    check_report(decode(batch=MAX_BATCH, context_tokens=10))
    check_report(decode(batch=3, context_tokens=10, capacity_tokens=100, node="n"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"role": pb.ROLE_UNKNOWN}, "role is ROLE_PREFILL, ROLE_DECODE or ROLE_BOTH, not 0"),
        ({"role": 7}, "not 7"),
        ({"name": ""}, "name is 1 to 255 bytes long, not 0"),
        ({"name": "ä" * 128}, "not 256"),
        ({"address": ""}, "address is 1 to 2048 bytes long"),
        ({"address": "x" * 2049}, "not 2049"),
        ({"node": "x" * 256}, "node is 0 to 255 bytes long"),
        ({"queue_s": -1.0}, "queue_s = -1"),
        ({"seen_after_s": -1.0}, "seen_after_s = -1"),
        ({"queue_s": float("nan")}, "queue_s = nan"),
        ({"queue_s": float("inf")}, "queue_s = inf"),
        ({"send_bytes_per_s": -1.0}, "send_bytes_per_s"),
        ({"send_bytes_per_s": 1e-300}, "0 or at least 1"),
        ({"send_backlog_bytes": 1 << 60}, "send_backlog_bytes"),
        ({"batch": MAX_BATCH + 1}, "batch = 1.04858e\\+06: it must be in"),
        ({"context_tokens": 1 << 60}, "context_tokens"),
        ({"capacity_tokens": 1 << 60}, "capacity_tokens"),
        ({"seen_request_ids": range(MAX_SEEN + 1)}, "65537 seen_request_ids: at most 65536"),
        ({"prefill_samples": [pb.PrefillSample()] * (MAX_SAMPLES + 1)}, "257 prefill_samples: at most 256"),
        ({"decode_samples": [pb.DecodeSample()] * (MAX_SAMPLES + 1)}, "257 decode_samples"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        check_report(prefill(**fields))


def test_samples_are_those_that_were_measured() -> None:
    report = prefill(
        prefill_samples=[pb.PrefillSample(input_tokens=10, prefix_tokens=4, duration_s=0.5)],
        decode_samples=[pb.DecodeSample(batch=2, context_tokens=30, duration_s=0.25)],
    )
    assert samples_of(report) == ([PrefillSample(10, 4, 0.5)], [DecodeSample(2, 30, 0.25)])


@pytest.mark.parametrize(
    "fields",
    [
        {"prefill_samples": [pb.PrefillSample(input_tokens=10, prefix_tokens=11, duration_s=0.5)]},
        {"prefill_samples": [pb.PrefillSample(input_tokens=10, duration_s=1e-7)]},
        {"decode_samples": [pb.DecodeSample(batch=1, context_tokens=30, duration_s=1e7)]},
        {"decode_samples": [pb.DecodeSample(batch=1, context_tokens=30, duration_s=float("nan"))]},
    ],
)
def test_samples_that_cannot_have_been_measured_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        samples_of(prefill(**fields))
