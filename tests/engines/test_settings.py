"""Settings from an engine's configuration; the engine's own entries are ignored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.engines.lmcache.settings import from_parameters
from kvstore.engines.settings import settings_from
from kvstore.engines.sglang.settings import ENGINE_ENTRIES
from kvstore.engines.sglang.settings import from_extra_config as of_sglang
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.settings import from_extra_config as of_vllm
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import setting


@dataclass(frozen=True)
class Two:
    name: str = setting("a", "A name.")
    count: int = setting(1, "A count.", minimum=1)


def test_given_values_are_stronger_than_the_environment() -> None:
    assert settings_from(Two, "two", {"name": "b"}, source="extra", environ={"KVSTORE_TWO_NAME": "c", "KVSTORE_TWO_COUNT": "7"}) == Two(
        "b", 7
    )


def test_entries_that_are_the_engines_own_are_left_alone() -> None:
    assert settings_from(Two, "two", {"module_path": 1, "count": 3}, source="extra", engine_names={"module_path"}, environ={}) == Two(
        "a", 3
    )


def test_unknown_entry_is_rejected_with_the_engines_term() -> None:
    with pytest.raises(ConfigError, match="extra: unknown setting colour, size; known are count, name"):
        settings_from(Two, "two", {"size": 1, "colour": 2}, source="extra", environ={})


@pytest.mark.parametrize(("source", "entry"), [("extra", "extra.count"), ("extra, our_*", "extra, our_count")])
def test_bad_value_is_named_as_the_user_wrote_it(source: str, entry: str) -> None:
    with pytest.raises(ConfigError, match=f"^{entry}: 'fast' is not a whole number$"):
        settings_from(Two, "two", {"count": "fast"}, source=source, environ={})


@pytest.mark.parametrize(
    ("read", "word"),
    [
        (from_parameters, "adapter_params"),
        (of_sglang, "hicache_storage_backend_extra_config"),
        (of_vllm, "kv_connector_extra_config"),
    ],
)
def test_each_engine_reads_its_mapping_and_its_environment(read: Callable[[Mapping[str, Any], Mapping[str, str]], Any], word: str) -> None:
    environ = {f"KVSTORE_{engine}_{name}": name for engine in ("LMCACHE", "SGLANG", "VLLM") for name in ("MASTER", "SALT")}
    found = read({"master": "b:2", "dtype": "float32"} if read is from_parameters else {"master": "b:2"}, environ)
    assert (found.master, found.salt, found.load_deadline_s) == ("b:2", "SALT", 5.0)
    with pytest.raises(ConfigError, match=f"{word}: unknown setting mastr; known are .*master"):
        read({"mastr": "b:2"}, {})
    with pytest.raises(ConfigError, match=rf"{word}\.load_deadline_s: .* below the minimum"):
        read({"load_deadline_s": 0}, {})


def test_defaults_and_entries_of_sglang_are_kept() -> None:
    assert of_vllm({}, {}) == VllmSettings()
    assert of_sglang(None, {}).master == "127.0.0.1:7440"
    settings = of_sglang(dict.fromkeys(ENGINE_ENTRIES, 1) | {"master": "kv:1", "model": "llama"}, {})
    assert (settings.master, settings.model) == ("kv:1", "llama")
