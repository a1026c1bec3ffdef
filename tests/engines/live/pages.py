"""The commands and configurations of docs/engines.md, for tests that run them as printed but for addresses, ports and folders."""

import json
import shlex
from typing import Any, Final

from tests.docs.shell_blocks import ROOT, SHELL, code

PAGE: Final = ROOT / "docs" / "engines.md"
MASTER: Final = "127.0.0.1:7440"
"""Master address that the page uses."""


def command(*first: str, changes: dict[str, str]) -> list[str]:
    """The words of the one command of the page that begins with `first`, with texts replaced in them, each of which must be there."""
    (words,) = [
        words
        for block in code(PAGE, SHELL)
        if (words := shlex.split(block.replace("\\\n", " "), comments=True))[: len(first)] == list(first)
    ]
    for old, new in changes.items():
        assert any(old in word for word in words), f"{old} is not in {shlex.join(words)}"
        words = [word.replace(old, new) for word in words]
    return words


def configuration(part: str, *, changes: dict[str, str]) -> dict[str, Any]:
    """The one object of JSON on the page that has `part` in it, with texts replaced, each of which must be there."""
    (text,) = [block for block in code(PAGE, "json") if part in block]
    for old, new in changes.items():
        assert old in text, f"{old} is not in {text}"
        text = text.replace(old, new)
    found: dict[str, Any] = json.loads(text)
    return found
