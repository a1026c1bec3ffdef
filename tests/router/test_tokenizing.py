"""Promises of tokenizing.py. The package `tokenizers` is optional: what needs it is skipped without."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.router.tokenizing import ByteTokenizer, FileTokenizer, load_tokenizer

has_package = find_spec("tokenizers") is not None


@given(st.text())
def test_a_token_is_a_byte(text: str) -> None:
    assert bytes(ByteTokenizer().encode(text)) == text.encode()


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no Unicode text: surrogates not allowed at character 2"):
        ByteTokenizer().encode("ab\ud800")


def test_without_a_file_the_tokens_are_bytes() -> None:
    assert isinstance(load_tokenizer(""), ByteTokenizer)


@pytest.mark.skipif(has_package, reason="tokenizers is installed")
def test_without_the_package_a_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizers is not installed, and this needs it: pip install '.\[tokenizers\]'"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.skipif(not has_package, reason="tokenizers is not installed")
def test_a_file_gives_its_own_tokens_of_unicode_text(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "hello": 7, "world": 3}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model, "added_tokens": []}))
    tokenizer = FileTokenizer(str(path))
    assert tokenizer.encode("hello there world") == [7, 0, 3]
    with pytest.raises(InvalidArgument, match="no Unicode text: surrogates not allowed at character 6"):
        tokenizer.encode("hello \ud800")


@pytest.mark.skipif(not has_package, reason="tokenizers is not installed")
def test_a_file_that_is_no_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer .*x\.json"):
        load_tokenizer(str(tmp_path / "x.json"))
