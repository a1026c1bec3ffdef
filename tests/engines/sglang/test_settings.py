"""Settings of the SGLang plug-in, beside those of SGLang in the same mapping."""

import pytest

from kvstore.engines.sglang.settings import ENGINE_ENTRIES, from_extra_config
from kvstore.protocol.errors import ConfigError


def test_sglangs_own_entries_are_left_alone() -> None:
    settings = from_extra_config(dict.fromkeys(ENGINE_ENTRIES, 1) | {"master": "kv:1", "model": "llama"}, {})
    assert (settings.master, settings.model, settings.lookup_deadline_s) == ("kv:1", "llama", 0.5)


def test_nothing_given_is_all_defaults() -> None:
    assert from_extra_config(None, {}).master == "127.0.0.1:7440"
    assert from_extra_config({}, {"KVSTORE_SGLANG_TOKEN": "secret"}).token == "secret"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="hicache_storage_backend_extra_config: unknown setting masters"):
        from_extra_config({"masters": "kv:1"}, {})
