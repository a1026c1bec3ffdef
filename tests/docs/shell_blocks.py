"""Blocks of code in the documentation, and the commands of its shell blocks.

bash itself reads a shell block: it expands loops, variables and quotes, and each program that it would start is recorded in place of being
started. A block is a shell block if its fence says `sh`.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "deploy" / "README.md",
)
SHELL: Final = "sh"
RECORDER: Final = r"""
command_not_found_handle() { printf '%s\0' "$#" "$@" "${!KVSTORE_@}" "" >"$RECORD/$EPOCHREALTIME-$BASHPID"; }
cd() { :; }
source() { :; }
kill() { :; }
"""
"""bash calls the first one for a program that PATH does not have, in a process of its own, several at once. Each records, in a file of its
own, the number of words, the words, the names of exported settings and an empty text. Builtins that need started programs do nothing."""
_IN_ENVIRONMENT: Final = re.compile(r"(?<![\w./$-])[\w./-]*/bin/(?=[\w-]+)")


"""The folder of an environment, before the name of a program: the name alone is recorded."""
_OF_THE_SYSTEM: Final = re.compile(r"(?<=>)\s*/(?!dev/)\S+")
"""A file of the machine that a block writes: nothing is written."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced or indented block of a page. `line`: of its first line of code, from 1. `language` is "" without a fence that names it."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def name(self) -> str:
        """PAGE:LINE, the page by its path in the checkout."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One program that a block starts, with its arguments. `settings`: names of the exported variables that begin with KVSTORE_."""

    block: Block
    words: tuple[str, ...]
    settings: tuple[str, ...] = ()


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """All blocks of code of a page, in their order."""
    found = []
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            is_fence = token.type == "fence"
            found.append(Block(page, token.map[0] + 1 + is_fence, token.info.strip(), token.content))
    return tuple(found)


def code(page: Path, language: str) -> list[str]:
    """The code of a page's blocks whose fence names `language`."""
    return [block.code for block in blocks(page) if block.language == language]


@cache
def commands(block: Block) -> tuple[Command, ...]:
    """Programs that bash would start for a shell block, builtins excepted. Raises AssertionError for what bash cannot read."""
    script = RECORDER + _OF_THE_SYSTEM.sub("/dev/null", _IN_ENVIRONMENT.sub("", block.code)) + "\nwait\n"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as record:
        read = subprocess.run(
            ["/bin/bash", "-c", script],
            cwd=folder,
            env={"PATH": "/nonexistent", "HOME": folder, "RECORD": record},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not read.stderr, f"{block.name}: {read.stderr}"
        return tuple(_recorded(block, path.read_text(encoding="utf-8").split("\0")) for path in sorted(Path(record).iterdir()))


def _recorded(block: Block, fields: list[str]) -> Command:
    end = 1 + int(fields[0])
    return Command(block, tuple(fields[1:end]), tuple(fields[end : fields.index("", end)]))


def shell_blocks() -> list[Block]:
    """Of all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language == SHELL]


def all_commands() -> list[Command]:
    """Of all shell blocks of all pages."""
    return [command for block in shell_blocks() for command in commands(block)]
