"""Settings of the LMCache plug-ins, as LMCache hands them over."""

import pytest

from kvstore.engines.lmcache.settings import LMCacheSettings, element_type, from_extra_config, from_parameters
from kvstore.protocol.errors import ConfigError


def test_what_is_given_is_taken_and_the_rest_has_defaults() -> None:
    settings = from_parameters({"master": "kv:1", "dtype": "float32", "load_deadline_s": 2, "chunk_tokens": "64"}, {})
    assert (settings.master, settings.load_deadline_s, settings.chunk_tokens) == ("kv:1", 2.0, 64)
    assert (settings.lookup_deadline_s, settings.dtype) == (0.5, "float32")


def test_token_may_come_from_the_environment() -> None:
    settings = from_parameters({"tenant": "a", "dtype": "float32"}, {"KVSTORE_LMCACHE_TOKEN": "secret", "KVSTORE_LMCACHE_TENANT": "b"})
    assert (settings.tenant, settings.token) == ("a", "secret")


def test_l2_adapter_requires_an_element_type() -> None:
    with pytest.raises(ConfigError, match=r'lack dtype.* as "dtype": "bfloat16"'):
        from_parameters({"master": "kv:1"}, {})
    assert from_parameters({}, {"KVSTORE_LMCACHE_DTYPE": "bfloat16"}).dtype == "bfloat16"


def test_a_remote_storage_plug_in_has_entries_of_its_own() -> None:
    extra = {
        "remote_storage_plugin.kvstore.module_path": "kvstore.engines.lmcache.connector",
        "remote_storage_plugin.kvstore.class_name": "KVStoreConnectorAdapter",
        "remote_storage_plugin.kvstore.master": "a:1",
        "remote_storage_plugin.kvstore.second.master": "b:1",
        "save_chunk_meta": False,
    }
    with pytest.raises(ConfigError, match=r"second\.master"):
        from_extra_config(extra, "kvstore", {})
    assert from_extra_config(extra, "kvstore.second", {}).master == "b:1"
    del extra["remote_storage_plugin.kvstore.second.master"]
    assert from_extra_config(extra, "kvstore", {}).master == "a:1"


def test_remote_connector_requires_a_type_for_bytes() -> None:
    """LMCache calls caches of fp8_e4m3 and fp8_e5m2 uint8: their engines would read each other's chunks."""
    for stored_as in ("uint8", "int8"):
        with pytest.raises(ConfigError, match=rf'{stored_as}.*NAME\.dtype": "fp8_e4m3"'):
            element_type(LMCacheSettings(), stored_as)
    assert element_type(LMCacheSettings(), "bfloat16") == "bfloat16"
    assert element_type(LMCacheSettings(dtype="fp8_e5m2"), "uint8") == "fp8_e5m2"


def test_deadlines_and_room_are_those_of_jobs() -> None:
    jobs = from_parameters({"dtype": "any", "lookup_deadline_s": 1}, {}).jobs()
    assert (jobs.lookup_deadline_s, jobs.load_deadline_s, jobs.queue_bytes) == (1.0, 5.0, 1 << 30)
