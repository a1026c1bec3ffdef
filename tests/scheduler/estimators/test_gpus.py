"""Named GPUs have the figures of their data sheets."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.estimators.analytic import GPUS, GpuFacts, find_gpu


def test_the_size_of_the_memory_may_be_left_out() -> None:
    assert find_gpu("a800") is GPUS["A800-80G"]
    assert find_gpu("A100") is GPUS["A100-80G"]


@pytest.mark.parametrize("facts", GPUS.values(), ids=GPUS)
def test_figures_are_in_the_units_they_say(facts: GpuFacts) -> None:
    assert 100e12 < facts.flops_per_s < 3000e12
    assert 300e9 <= facts.hbm_bytes_per_s < 10e12
    assert 24e9 <= facts.hbm_bytes < 300e9
    assert facts.nvlink_bytes_per_s == 0 or 50e9 < facts.nvlink_bytes_per_s < 1e12
    assert 10e9 < facts.nic_bytes_per_s < 100e9


def test_an_unknown_gpu_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no GPU is named 'A9000': take one of A40, A100-80G, A800-80G"):
        find_gpu("A9000")


def test_a_gpu_of_ones_own_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '{"name":"mine","flops_per_s":1e14,"hbm_bytes_per_s":1e12,"hbm_bytes":32000000000,"nvlink_bytes_per_s":0,"nic_bytes_per_s":1e10}'
    )
    assert find_gpu(str(path)) == GpuFacts("mine", 1e14, 1e12, 32 * 10**9, 0, 1e10)


def test_a_figure_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="hbm_bytes is 0"):
        replace(find_gpu("H100"), hbm_bytes=0)
