"""Removal of objects: by key, by a pattern of keys, all.

A pattern is an ECMAScript regular expression, as Mooncake's master takes it, made one of Python's `re` over bytes.

The master compiles with libstdc++ `std::regex::ECMAScript` and searches keys as bytes in the C locale. What that refuses raises
InvalidArgument here, so that no pattern is read as another one.
"""

import re
from typing import Final

from kvstore.client import Client
from kvstore.engines.mooncake.arguments import Flag, Text, Texts
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OBJECT_HAS_LEASE, OBJECT_NOT_FOUND, OK
from kvstore.engines.mooncake.link import Link
from kvstore.protocol.errors import InvalidArgument

CLASSES: Final = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z", "space": r"\s", "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "punct": r"!-/:-@\[-`{-~", "print": " -~", "graph": "!-~", "xdigit": "0-9a-fA-F", "d": "0-9", "s": r"\s", "w": "a-zA-Z0-9_",
}  # fmt: skip
"""POSIX classes of the C locale, as the inside of a set."""
CONTROLS: Final = {"t": r"\t", "n": r"\n", "r": r"\r", "v": r"\v", "f": r"\f", "0": r"\x00"}
SETS: Final = {"d": "0-9", "s": r"\s", "w": "a-zA-Z0-9_"}
GROUPS: Final = ("?:", "?=", "?!")
ANY: Final = r"[^\n\r]"
NEVER: Final = "(?!)"


def compiled(pattern: str) -> re.Pattern[bytes]:
    """Compile a pattern of Mooncake's. Raises InvalidArgument for what is none there."""
    try:
        translated = _Translation(pattern.encode(errors="surrogateescape").decode("latin-1")).run()
        return re.compile(translated.encode("latin-1"))
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{pattern!r:.80} is no regular expression: {error}") from None


class _Translation:
    """One pass over a pattern; a character is a byte."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._groups = 0

    def run(self) -> str:
        found = self._alternatives()
        if self._at < len(self._pattern):
            raise self._refused(") closes no group")
        return found

    def _alternatives(self) -> str:
        """All up to the end of the pattern, or of the group."""
        found = ""
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            found += self._quantified(self._atom())
        return found

    def _quantified(self, atom: str) -> str:
        """The atom with all quantifiers that follow it: each repeats what is before it."""
        has_one = False
        while quantifier := self._quantifier():
            atom = (f"(?:{atom})" if has_one else atom) + quantifier
            has_one = True
        return atom

    def _quantifier(self) -> str:
        character = self._pattern[self._at : self._at + 1]
        if character not in ("*", "+", "?", "{"):
            return ""
        self._at += 1
        found = self._braces() if character == "{" else character
        if self._pattern.startswith("?", self._at):  # a lazy one
            self._at += 1
            found += "?"
        return found

    def _braces(self) -> str:
        match = re.compile(r"\d+(,\d*)?\}").match(self._pattern, self._at)
        if match is None:
            raise self._refused("{ begins no number of repetitions")
        self._at = match.end()
        return "{" + match.group()

    def _atom(self) -> str:
        character = self._take()
        match character:
            case "\\":
                return self._escape()
            case "[":
                return self._set()
            case "(":
                return self._group()
            case "$":
                return r"\Z"
            case ".":
                return ANY
            case "*" | "+" | "?" | "{":
                raise self._refused(f"{character} has nothing to repeat")
            case _:
                return character if character in "^|" else re.escape(character)

    def _group(self) -> str:
        kind = ""
        if self._pattern.startswith("?", self._at):
            kind = next((kind for kind in GROUPS if self._pattern.startswith(kind, self._at)), "")
            if not kind:
                raise self._refused("a group is (, (?:, (?= or (?!")
            self._at += len(kind)
        else:
            self._groups += 1
        inside = self._alternatives()
        self._take("a group has no end")
        return f"({kind}{inside})"

    def _escape(self) -> str:
        character = self._take("an escape ends the pattern")
        if character in "bBdDsSwW":
            return "\\" + character
        if character.isascii() and character.isdigit() and character != "0":
            return self._reference(character)
        return self._literal(character)

    def _reference(self, digits: str) -> str:
        while self._pattern[self._at : self._at + 1].isdigit():
            digits += self._take()
        if int(digits) > self._groups:
            raise self._refused(f"there is no group {digits}")
        return f"(?({digits})\\{digits}|)"  # in Python a reference to a group without a match fails

    def _literal(self, character: str) -> str:
        """An escape that stands for one character."""
        if character in CONTROLS:
            return CONTROLS[character]
        if character == "c":
            return re.escape(self._take("\\c ends the pattern"))  # libstdc++ matches the letter, not its control character
        if character in "xu":
            digits = self._pattern[self._at : self._at + (2 if character == "x" else 4)]
            if re.fullmatch("[0-9a-fA-F]{2}|[0-9a-fA-F]{4}", digits) is None:
                raise self._refused(f"\\{character} wants hexadecimal digits")
            self._at += len(digits)
            return re.escape(chr(int(digits, 16) & 0xFF))
        return re.escape(character)

    # --- sets ---

    def _set(self) -> str:
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        inside, can_begin = "", False
        while (character := self._take("a set has no end")) != "]":
            if character == "-" and can_begin and not self._pattern.startswith("]", self._at):
                inside += "-"
                can_begin = False
                continue
            found, can_begin = self._member(character)
            inside += found
        if not inside:
            return r"[\x00-\xff]" if is_negated else NEVER
        return f"[{'^' * is_negated}{inside}]"

    def _member(self, character: str) -> tuple[str, bool]:
        """One member of a set, and whether a range can begin with it."""
        if character == "[" and self._pattern[self._at : self._at + 1] in (":", ".", "="):
            return self._bracketed()
        if character != "\\":
            return _in_set(character), True
        character = self._take("an escape ends the pattern")
        if character in SETS:
            return SETS[character], False
        if character in "DSW":
            return "\\" + character, False
        return ("\\x08" if character == "b" else self._literal(character)), True

    def _bracketed(self) -> tuple[str, bool]:
        """`[:class:]`, `[.x.]` or `[=x=]`."""
        kind = self._take()
        end = self._pattern.find(kind + "]", self._at)
        name = self._pattern[self._at : end] if end >= 0 else ""
        self._at = end + 2
        if kind == ":" and name in CLASSES:
            return CLASSES[name], False
        if kind in ".=" and len(name) == 1:
            return ("".join(map(_in_set, {name.lower(), name.upper()})), False) if kind == "=" else (_in_set(name), True)
        raise self._refused(f"[{kind}{name}{kind}] is no class of characters")

    # --- the pattern ---

    def _take(self, otherwise: str = "") -> str:
        if self._at >= len(self._pattern):
            raise self._refused(otherwise)
        self._at += 1
        return self._pattern[self._at - 1]

    def _refused(self, reason: str) -> InvalidArgument:
        return InvalidArgument(f"{self._pattern!r:.80} is no regular expression: {reason}")


def _in_set(character: str) -> str:
    return "\\" + character if character in "\\]^-[&~|" else character


class Removals(Link):
    """Objects that are pinned, leased or being read stay unless `force`."""

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
        """Remove objects of whose key any part matches an ECMAScript pattern. Return how many were removed, or a code: -600 for no
        pattern."""
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
        """The keys of all objects of this API and tenant."""
        from kvstore.client.control import Control  # the control plane needs grpc, which nothing else here does

        with Control.find(self._settings) as control:
            return [found.key for found in control.keys(self._namespace)]
