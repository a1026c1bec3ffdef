"""Promises of keys.py."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.cli.keys import KEY, parse_key, show_key
from kvstore.protocol.errors import InvalidArgument


@given(st.binary(min_size=1, max_size=255))
def test_every_key_shown_is_read_back(key: bytes) -> None:
    shown = show_key(key)
    assert shown.isprintable()
    assert parse_key(shown) == key


@pytest.mark.parametrize(
    ("text", "key"),
    [("greeting", b"greeting"), ("Grüße", "Grüße".encode()), ("hex:00fF", b"\x00\xff"), ("hex", b"hex"), ("\udcff", b"\xff")],
)
def test_text_is_utf_8_and_hex_is_bytes(text: str, key: bytes) -> None:
    assert parse_key(text) == key


@pytest.mark.parametrize(("text", "complaint"), [("", "1 to 255 bytes"), ("x" * 256, "1 to 255 bytes"), ("hex:", "1 to 255 bytes")])
def test_a_key_of_a_wrong_length_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        parse_key(text)


@pytest.mark.parametrize("text", ["hex:0", "hex:zz"])
def test_bad_hexadecimal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        parse_key(text)


def test_as_an_argument_a_bad_key_is_a_usage_error() -> None:
    with pytest.raises(click.BadParameter, match="hexadecimal"):
        KEY.convert("hex:0", None, None)
    assert KEY.convert(b"as it is", None, None) == b"as it is"
