"""The estimators of this package are what the interfaces ask for, as mypy checks, and keep what they promise."""

import pytest

from kvstore.kvcache.models.named import find_model
from kvstore.scheduler.estimators.analytic import AnalyticModel
from kvstore.scheduler.estimators.gpus import find_gpu
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime, TransferTime
from kvstore.scheduler.estimators.online import OnlineDecode, OnlinePrefill
from kvstore.scheduler.estimators.transfer_time import BandwidthTransfer

ANALYTIC = AnalyticModel(find_model("llama3-8b"), find_gpu("H100"))
PREFILL: list[PrefillTime] = [ANALYTIC, OnlinePrefill(ANALYTIC)]
DECODE: list[DecodeTime] = [ANALYTIC, OnlineDecode(ANALYTIC)]
TRANSFER: list[TransferTime] = [BandwidthTransfer(), BandwidthTransfer(latency_s=1e-3)]


@pytest.mark.parametrize("estimator", PREFILL)
def test_a_longer_prompt_takes_longer_and_a_longer_prefix_shortens_it(estimator: PrefillTime) -> None:
    assert 0 < estimator.prefill_s(4096, 2048) < estimator.prefill_s(4096, 0) < estimator.prefill_s(8192, 0)


@pytest.mark.parametrize("estimator", DECODE)
def test_a_larger_batch_and_more_context_take_longer(estimator: DecodeTime) -> None:
    assert 0 < estimator.tbt_s(1, 1000) < estimator.tbt_s(8, 1000) < estimator.tbt_s(8, 80_000)


@pytest.mark.parametrize("estimator", TRANSFER)
def test_more_bytes_take_longer_and_none_take_no_time(estimator: TransferTime) -> None:
    assert estimator.transfer_s(0, backlog_bytes=10, bytes_per_s=1e9) == 0
    assert estimator.transfer_s(10, backlog_bytes=0, bytes_per_s=1e9) < estimator.transfer_s(10, backlog_bytes=10, bytes_per_s=1e9)
