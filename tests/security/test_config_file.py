"""Promises of config_file.py."""

from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.security.config_file import read_toml, signature


def test_signature_differs_after_write_replace_and_removal(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    assert signature(str(file)) == ()
    file.write_text("one")
    written = signature(str(file))
    assert signature(str(file)) == written
    file.write_text("longer")
    longer = signature(str(file))
    other.write_text("longer")
    other.replace(file)
    assert len({(), written, longer, signature(str(file))}) == 4
    file.unlink()
    assert signature(str(file)) == ()


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "it.toml"
    file.write_text("[a]\nb = 1\n")
    assert read_toml(str(file), "the file", max_bytes=11) == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[a", "the file .* is not TOML"),
        (b"a = 1" + b"1" * 5000, "the file .* is not TOML"),
        (b"\xff", "cannot read the file .*"),
        (b" " * 6001, "the file .* has more than 5.9 KiB"),
        (None, "^cannot read the file .*it.toml: No such file or directory$"),
    ],
    ids=["malformed", "a number too long", "not text", "too large", "missing"],
)
def test_what_cannot_be_used_is_one_error(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "it.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        read_toml(str(file), "the file", max_bytes=6000)
