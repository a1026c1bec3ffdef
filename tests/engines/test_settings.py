"""What an engine hands over becomes settings; what is the engine's own is left alone."""

from dataclasses import dataclass

import pytest

from kvstore.engines.settings import settings_from
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


def test_an_unknown_entry_is_refused_by_the_engines_word_for_the_mapping() -> None:
    with pytest.raises(ConfigError, match="extra: unknown setting colour, size; known are count, name"):
        settings_from(Two, "two", {"size": 1, "colour": 2}, source="extra", environ={})


@pytest.mark.parametrize(("source", "entry"), [("extra", "extra.count"), ("extra, our_*", "extra, our_count")])
def test_bad_value_is_named_as_the_user_wrote_it(source: str, entry: str) -> None:
    with pytest.raises(ConfigError, match=f"^{entry}: 'fast' is not a whole number$"):
        settings_from(Two, "two", {"count": "fast"}, source=source, environ={})
