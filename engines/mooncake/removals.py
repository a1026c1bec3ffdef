"""Mooncake's removal of objects: by key, by a pattern of keys, or all.

A pattern is an ECMAScript regular expression, which Mooncake's master compiles with libstdc++ and searches in the bytes
of a key. Syntax that Python's `re` reads differently is translated. Rare syntax, and syntax without a translation, is
rejected, so no pattern silently changes its meaning.
"""

import re
from typing import Final

from kvstore.client import Client
from kvstore.engines.mooncake.arguments import Flag, Text, Texts
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OBJECT_HAS_LEASE, OBJECT_NOT_FOUND, OK
from kvstore.engines.mooncake.link import StoreConnection
from kvstore.protocol.errors import InvalidArgument

CLASSES: Final = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z", "space": r"\s", "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "punct": r"!-/:-@\[-`{-~", "print": " -~", "graph": "!-~", "xdigit": "0-9a-fA-F", "d": "0-9", "s": r"\s", "w": "a-zA-Z0-9_",
}  # fmt: skip
"""POSIX classes of the C locale, as the inside of a Python character set."""
_ESCAPE: Final = r"\\(?:[dDsSwWtnrvf]|[^a-zA-Z0-9])"
_MEMBER: Final = rf"\[:(?P<class>{'|'.join(CLASSES)}):\]|{_ESCAPE}|\\b|\[(?![:.=])|[^\[\]\\]"
_TOKEN: Final = re.compile(
    rf"(?P<end>\$)|(?P<any>\.)|(?P<set>\[\^?(?:{_MEMBER.replace('?P<class>', '?:')})+\])|\(\?[:=!]|\((?!\?)|[)|^]"
    rf"|(?:[*+?]|\{{\d+(?:,\d*)?\}})\??(?![*+?{{])|{_ESCAPE}|\\[bB]|(?P<plain>[^\\(\[{{*+?])",
    re.DOTALL,
)


def compiled(pattern: str) -> re.Pattern[bytes]:
    """Compile Mooncake's pattern. Raises InvalidArgument: the pattern is invalid or unsupported."""
    text = pattern.encode(errors="surrogateescape").decode("latin-1")
    found, at = "", 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise InvalidArgument(f"{pattern!r:.80} is no regular expression that is supported, from {text[at : at + 20]!r} on")
        found += _translated(token)
        at = token.end()
    try:
        return re.compile(found.encode("latin-1"))
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{pattern!r:.80} is no regular expression: {error}") from None


def _translated(token: re.Match[str]) -> str:
    match token.lastgroup:
        case "end":
            return r"\Z"
        case "any":
            return r"[^\n\r]"
        case "set":
            opening = "[^" if token[0].startswith("[^") else "["
            return opening + re.sub(_MEMBER, _member, token[0][len(opening) : -1], flags=re.DOTALL) + "]"
        case "plain":
            return re.escape(token[0])
        case _:
            return token[0]


def _member(found: re.Match[str]) -> str:
    """Translate one member of a set. `[`, `&`, `~` and `|` are escaped, because later Python versions give pairs of
    them a meaning."""
    if found["class"]:
        return CLASSES[found["class"]]
    return f"\\{found[0]}" if found[0] in "[&~|" else found[0]


class ObjectRemovals(StoreConnection):
    """Calls that remove objects. Pinned, leased and open objects stay unless `force`."""

    def remove(self, key: Text, force: Flag = False) -> int:
        def remove(client: Client) -> int:
            name = self._key(key)
            if client.remove([name], force=force):
                return OK
            return OBJECT_HAS_LEASE if client.exists(name) else OBJECT_NOT_FOUND

        return self._call(remove)

    def batch_remove(self, keys: Texts, force: Flag = False) -> list[int]:
        return [self.remove(key, force) for key in keys]

    def remove_by_regex(self, regex_pattern: Text, force: Flag = False) -> int:
        """Remove objects whose key contains a match of an ECMAScript pattern. Return how many were removed, or a
        code; -600: invalid pattern."""
        try:
            pattern = compiled(regex_pattern)
        except InvalidArgument:
            return INVALID_PARAMS

        def remove(client: Client) -> int:
            names = [name for name in self._names() if pattern.search(self._given(name))]
            return client.remove(names, force=force)

        return self._call(remove)

    def remove_all(self, force: Flag = False) -> int:
        """Remove every object of this API and tenant. Return how many were removed, or a code."""
        return self._call(lambda client: client.remove_matching(namespace=self._namespace, force=force))

    def _names(self) -> list[bytes]:
        """Return the keys of all objects of this API and tenant."""
        from kvstore.client.control import Control  # imported here: only the control plane needs grpc

        with Control.find(self._settings) as control:
            return [found.key for found in control.keys(self._namespace)]
