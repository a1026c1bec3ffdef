"""What `kv_connector_extra_config` may say."""

import pytest

from kvstore.engines.vllm.settings import VllmSettings, from_extra_config, job_settings
from kvstore.protocol.errors import ConfigError


def test_nothing_said_means_the_defaults() -> None:
    assert from_extra_config({}, {}) == VllmSettings()


def test_it_is_stronger_than_the_environment() -> None:
    environ = {"KVSTORE_VLLM_MASTER": "a:1", "KVSTORE_VLLM_SALT": "s"}
    settings = from_extra_config({"master": "b:2", "load_async": False, "write_behind_bytes": "1GiB"}, environ)
    assert (settings.master, settings.salt, settings.load_async, settings.write_behind_bytes) == ("b:2", "s", False, 1 << 30)


def test_what_is_unknown_or_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting mastr; known are .*master"):
        from_extra_config({"mastr": "b:2"}, {})
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config.load_deadline_s: .* below the minimum"):
        from_extra_config({"load_deadline_s": 0}, {})


def test_jobs_have_the_connector_s_deadlines_and_bounds() -> None:
    jobs = job_settings(VllmSettings(lookup_deadline_s=1, load_deadline_s=2, save_deadline_s=3))
    assert (jobs.lookup_deadline_s, jobs.load_deadline_s, jobs.store_deadline_s, jobs.queue_bytes) == (1, 2, 3, 512 << 20)
