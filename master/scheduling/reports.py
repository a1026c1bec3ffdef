"""Whether what an instance reports can be believed: limits on its texts, numbers and lists. It keeps nothing."""

from typing import Final, NamedTuple

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.regression import DecodeSample, PrefillSample

MAX_NAME_BYTES: Final = 255
MAX_ADDRESS_BYTES: Final = 2048
MAX_SEEN: Final = 65_536
"""Requests named in one report."""
MAX_BATCH: Final = 1 << 20
"""Sequences that one instance decodes at once: no engine has memory for so many."""
MAX_SAMPLES: Final = 256
"""Of each kind in one report. Each 32 cost a fit, which takes milliseconds of the loop's time (scheduler/estimators/online.py)."""
MAX_SECONDS: Final = 1e6
"""No queue is as long as eleven days: the figure is wrong."""
MAX_BYTES_PER_S: Final = 1e15
MAX_COUNT: Final = 1 << 53
"""Bytes and tokens beyond are no longer exact as floats, and are wrong anyway."""


class Samples(NamedTuple):
    """Measurements of one report."""

    prefill: list[PrefillSample]
    decode: list[DecodeSample]


def check_report(report: pb.ReportRequest) -> None:
    """Raises InvalidArgument, which names what is outside its range."""
    if report.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_BOTH):
        raise InvalidArgument(f"an instance's role is ROLE_PREFILL, ROLE_DECODE or ROLE_BOTH, not {report.role}")
    for name, text, least, most in (
        ("name", report.name, 1, MAX_NAME_BYTES),
        ("address", report.address, 1, MAX_ADDRESS_BYTES),
        ("node", report.node, 0, MAX_NAME_BYTES),
    ):
        if not least <= len(text.encode()) <= most:
            raise InvalidArgument(f"an instance's {name} is {least} to {most} bytes long, not {len(text.encode())}")
    for name, value, highest in (
        ("queue_s", report.queue_s, MAX_SECONDS),
        ("seen_after_s", report.seen_after_s, MAX_SECONDS),
        ("send_bytes_per_s", report.send_bytes_per_s, MAX_BYTES_PER_S),
        ("send_backlog_bytes", report.send_backlog_bytes, MAX_COUNT),
        ("batch", report.batch, MAX_BATCH),
        ("context_tokens", report.context_tokens, MAX_COUNT),
        ("capacity_tokens", report.capacity_tokens, MAX_COUNT),
    ):
        if not 0 <= value <= highest:
            raise InvalidArgument(f"instance {report.name!r} reports {name} = {value:g}: it must be in [0, {highest:g}]")
    if 0 < report.send_bytes_per_s < 1:
        raise InvalidArgument(
            f"instance {report.name!r} reports send_bytes_per_s = {report.send_bytes_per_s:g}: it must be 0 or at least 1"
        )
    for name, count, most in (
        ("seen_request_ids", len(report.seen_request_ids), MAX_SEEN),
        ("prefill_samples", len(report.prefill_samples), MAX_SAMPLES),
        ("decode_samples", len(report.decode_samples), MAX_SAMPLES),
    ):
        if count > most:
            raise InvalidArgument(f"instance {report.name!r} reports {count} {name}: at most {most} at once")


def samples_of(report: pb.ReportRequest) -> Samples:
    """What the instance has measured. Raises InvalidArgument for what cannot have been."""
    return Samples(
        [PrefillSample(each.input_tokens, each.prefix_tokens, each.duration_s) for each in report.prefill_samples],
        [DecodeSample(each.batch, each.context_tokens, each.duration_s) for each in report.decode_samples],
    )
