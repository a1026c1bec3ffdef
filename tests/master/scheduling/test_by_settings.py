"""Tests of scheduling/scheduler.py: estimators and policies by the settings."""

import pytest

from kvstore.master.config import MasterSettings
from kvstore.master.scheduling.scheduler import ClusterScheduler, make_estimators
from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.baselines import DISPATCHERS
from tests.master.blocks import Master


def test_estimators_follow_the_model_settings() -> None:
    assert "guess" in make_estimators(MasterSettings()).words
    assert "8 x H800, computed" in make_estimators(MasterSettings(scheduler_model="llama2-70b", scheduler_gpu="H800")).words


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (MasterSettings(scheduler_model="llama2-70b"), "go together"),
        (MasterSettings(scheduler_gpu="A800"), "go together"),
        (MasterSettings(scheduler_model="none such", scheduler_gpu="A800"), "none such"),
        (MasterSettings(scheduler_model="llama2-70b", scheduler_gpu="none such"), "none such"),
        (MasterSettings(scheduler_model="llama2-70b", scheduler_gpu="A800", scheduler_gpus=1), "does not fit"),
    ],
)
def test_a_model_that_cannot_be_computed_is_a_wrong_setting(settings: MasterSettings, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_estimators(settings)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("admission", ["all", "early", "predicted"])
def test_every_choice_of_the_settings_exists(dispatcher: str, admission: str) -> None:
    settings = MasterSettings(dispatcher=dispatcher, admission=admission)
    made = ClusterScheduler(settings, Master().directory, replicate=None, promote=None, wall_ns=1)  # type: ignore[arg-type]
    assert made.show(0).dispatcher == dispatcher
