"""Promises of config.py."""

import hashlib
from pathlib import Path

import pytest

from kvstore.master.config import MasterSettings, read_tokens
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import load_settings


def test_every_setting_has_a_default_that_is_in_its_range() -> None:
    assert load_settings(MasterSettings, "master", flags={}, environ={}) == MasterSettings()


def test_tokens_are_kept_as_digests_and_no_file_is_no_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text('[tenants]\nred = "secret"\n')
    assert read_tokens(str(file)) == {"red": hashlib.sha256(b"secret").digest()}
    assert read_tokens("") == {}


@pytest.mark.parametrize("text", ["", "[tenants]\n", "[tenants]\nred = 5\n", '[tenants]\nred = ""\n', "tenants = 3\n", "[tenants\n"])
def test_a_file_without_tokens_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"tokens\.toml"):
        read_tokens(str(file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the tokens"):
        read_tokens(str(tmp_path / "none"))
