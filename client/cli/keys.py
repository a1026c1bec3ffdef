"""Keys on the command line: text as UTF-8, or `hex:` and digits for any other bytes."""

import binascii
from typing import Any, Final

import click

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.frames import check_key

HEX: Final = "hex:"


class KeyType(click.ParamType[bytes]):
    """A KEY argument: its bytes."""

    name = "KEY"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        if isinstance(value, bytes):
            return value
        try:
            return parse_key(value)
        except (KVStoreError, ValueError) as error:
            self.fail(str(error), param, ctx)


KEY: Final = KeyType()


def parse_key(text: str) -> bytes:
    """The key's bytes. Raises InvalidArgument for a length outside 1 to 255 bytes, ValueError for bad hex digits."""
    if text.startswith(HEX):
        try:
            key = bytes.fromhex(text.removeprefix(HEX))
        except (ValueError, binascii.Error):
            raise ValueError(f"{text!r} is not a key: after {HEX} come pairs of hexadecimal digits, such as {HEX}00ff") from None
    else:
        # What the shell gave that was not UTF-8 comes as surrogates, and goes back to the same bytes.
        key = text.encode("utf-8", "surrogateescape")
    check_key(key)
    return key


def show_key(key: bytes) -> str:
    """A text that `parse_key` reads back."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return HEX + key.hex()
    return text if text.isprintable() and not text.startswith(HEX) else HEX + key.hex()
