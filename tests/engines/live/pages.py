"""The commands of docs/engines.md, for tests that run them as printed but for addresses, ports and folders."""

import re
import shlex
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[3] / "docs" / "engines.md"
MASTER: Final = "127.0.0.1:7440"
"""Where the page's cluster is."""


def command(*first: str, changes: dict[str, str]) -> list[str]:
    """The words of the one command of the page that begins with `first`, with texts replaced in them, each of which must be there."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (words,) = [words for block in blocks if (words := shlex.split(block.replace("\\\n", " ")))[: len(first)] == list(first)]
    for old, new in changes.items():
        assert any(old in word for word in words), f"{old} is not in {shlex.join(words)}"
        words = [word.replace(old, new) for word in words]
    return words
