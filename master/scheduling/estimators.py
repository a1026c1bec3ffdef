"""Estimators of prefill, decode and transfer times, fitted to the instances' measurements; a model or a guess until
there are enough. Also checks reports.

All instances of a role share one fit: they are assumed to be of one kind, as in Algorithm 1."""

from typing import Final, NamedTuple, TypeVar

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.dispatcher import Estimators
from kvstore.scheduler.estimators.analytic import AnalyticModel
from kvstore.scheduler.estimators.interface import BandwidthTransfer
from kvstore.scheduler.estimators.online import REFIT_SAMPLES, OnlineDecode, OnlinePrefill
from kvstore.scheduler.estimators.regression import DecodeSample, FitReport, PrefillSample

MAX_NAME_BYTES: Final = 255
MAX_ADDRESS_BYTES: Final = 2048
MAX_SEEN: Final = 65_536
"""Request ids in one report."""
MAX_BATCH: Final = 1 << 20
"""Sequences that one instance decodes at once: no engine has memory for so many."""
MAX_SAMPLES: Final = 256
"""Samples of each kind in one report. Each 32 cost a fit, which takes milliseconds of the loop
(scheduler/estimators/online.py)."""
MAX_SECONDS: Final = 1e6
"""Limit of plausible queues: eleven days."""
MAX_BYTES_PER_S: Final = 1e15
MAX_COUNT: Final = 1 << 53
"""Limit of bytes and tokens: larger values are not exact as floats."""


class Samples(NamedTuple):
    """Measurements of one report."""

    prefill: list[PrefillSample]
    decode: list[DecodeSample]


def check_report(report: pb.ReportRequest) -> None:
    """Raise InvalidArgument, which names the field that is out of range."""
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
    """Return the instance's measurements. Raises InvalidArgument for implausible ones."""
    return Samples(
        [PrefillSample(each.input_tokens, each.prefix_tokens, each.duration_s) for each in report.prefill_samples],
        [DecodeSample(each.batch, each.context_tokens, each.duration_s) for each in report.decode_samples],
    )


GUESSED_PREFILL_TOKENS_PER_S: Final = 10_000.0
"""About the rate of eight A800 for a prompt of Llama 2 70B."""
GUESSED_TBT_S: Final = 0.02
"""Time to load the weights in each step, for any number of sequences."""
GUESSED_CONTEXT_TOKENS_PER_S: Final = 4e7
"""Cached tokens that a decode step reads: 320 KB each at 13 TB/s."""


LEARNED_SAMPLES_PER_S: Final = REFIT_SAMPLES
"""A fit takes milliseconds of the loop, and occurs each REFIT_SAMPLES: so one a second of either kind."""

T = TypeVar("T")


class LinearGuess:
    """PrefillTime and DecodeTime without measurements: proportional, so that loads can be compared."""

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds for the tokens that are not cached."""
        return (input_tokens - prefix_tokens) / GUESSED_PREFILL_TOKENS_PER_S

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each sequence."""
        return GUESSED_TBT_S + context_tokens / GUESSED_CONTEXT_TOKENS_PER_S


class _Allowance:
    """Rate limit of learned samples; unused allowance is kept up to one full report."""

    def __init__(self) -> None:
        self._samples = float(MAX_SAMPLES)
        self._since_ns = 0

    def take(self, wanted: int, now_ns: int) -> int:
        """Return how many of `wanted` are allowed now."""
        earned = (now_ns - self._since_ns) / 1e9 * LEARNED_SAMPLES_PER_S
        self._samples, self._since_ns = min(MAX_SAMPLES, self._samples + earned), now_ns
        taken = min(wanted, int(self._samples))
        self._samples -= taken
        return taken


class LiveEstimators:
    """PrefillTime, DecodeTime and TransferTime of the reporting instances. Not thread-safe."""

    def __init__(self, model: AnalyticModel | None) -> None:
        """`model` is used until there are enough measurements; None for a guess."""
        start = model or LinearGuess()
        self._start = f"{model.model.name} on {model.gpus} x {model.gpu.name}, computed" if model else "a linear guess"
        self._prefill = OnlinePrefill(start)
        self._decode = OnlineDecode(start)
        self._transfer = BandwidthTransfer()
        self._prefill_allowance, self._decode_allowance = _Allowance(), _Allowance()
        self.block_bytes = 0
        """Bytes of a block of the current prompt. Set before each decision, since it differs between tenants."""

    def learn(self, samples: Samples, now_ns: int) -> None:
        """Add measurements, at most LEARNED_SAMPLES_PER_S of either kind: a hundred instances measure thousands a
        second."""
        for prefill in _latest(samples.prefill, self._prefill_allowance.take(len(samples.prefill), now_ns)):
            self._prefill.add(prefill)
        for decode in _latest(samples.decode, self._decode_allowance.take(len(samples.decode), now_ns)):
            self._decode.add(decode)

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute a prompt whose first `prefix_tokens` are cached."""
        return self._prefill.prefill_s(input_tokens, prefix_tokens)

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences with `context_tokens` of cache together."""
        return self._decode.tbt_s(batch, context_tokens)

    def transfer_s(self, size_bytes: int, *, backlog_bytes: int, bytes_per_s: float, measured_bytes_per_s: float | None = None) -> float:
        """Seconds until so many *blocks* have been sent: see `for_dispatcher`."""
        return self._transfer.transfer_s(
            size_bytes * self.block_bytes,
            backlog_bytes=backlog_bytes,
            bytes_per_s=bytes_per_s,
            measured_bytes_per_s=measured_bytes_per_s,
        )

    def for_dispatcher(self) -> Estimators:
        """Return the estimators for a dispatcher. It takes one block size for all prompts; here that differs, so its
        unit of size is the block, and `transfer_s` converts to bytes."""
        return Estimators(self, self, self, block_bytes=1)

    @property
    def words(self) -> str:
        """Describes the estimators, for operators."""
        return f"prefill: {self._words(self._prefill.report)}; decode: {self._words(self._decode.report)}"

    def _words(self, report: FitReport | None) -> str:
        return (
            self._start if report is None else f"fitted to {report.samples} samples, half of them within {report.median_relative_error:.1%}"
        )


def _latest(samples: list[T], count: int) -> list[T]:
    return samples[len(samples) - count :]
