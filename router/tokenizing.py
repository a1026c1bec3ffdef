"""Text to token ids. The engines get ids, so that their blocks have the keys that were scheduled by.

The default makes a token of each byte: right for the stand-in engines, which have no vocabulary, and for nothing else.
"""

import importlib
from typing import Any, Protocol

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.router.extra import need


class Tokenizer(Protocol):
    """Thread-safe."""

    def encode(self, text: str) -> list[int]:
        """Raises InvalidArgument for a text that has no tokens in this vocabulary."""
        ...


class ByteTokenizer:
    """The token of a byte is its value."""

    def encode(self, text: str) -> list[int]:
        """Raises InvalidArgument for a lone surrogate."""
        return list(_utf8(text))


class FileTokenizer:
    """A Hugging Face tokenizer.json, by the `tokenizers` package. Special tokens are added as its post-processor says."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError: the package is missing, or the file is no tokenizer."""
        need("tokenizers", "tokenizers")
        library: Any = importlib.import_module("tokenizers")
        try:
            self._tokenizer = library.Tokenizer.from_file(path)
        except Exception as error:  # the package has no type of its own for them
            raise ConfigError(f"cannot read the tokenizer {path}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Raises InvalidArgument for a lone surrogate."""
        _utf8(text)  # of what is none the package says that it is no str
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


def _utf8(text: str) -> bytes:
    """JSON can have a lone surrogate, which UTF-8 has no bytes for: raises InvalidArgument."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the prompt is no Unicode text: {error.reason} at character {error.start}") from None


def load_tokenizer(path: str) -> Tokenizer:
    """That of the file, or the byte-level one for no file. Raises ConfigError."""
    return FileTokenizer(path) if path else ByteTokenizer()
