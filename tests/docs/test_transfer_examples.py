"""Promises of docs/transfer.md: its examples run as they stand there, and its bytes and limits are the code's."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvstore.protocol import transfers
from kvstore.protocol.frames import MAX_PAYLOAD_BYTES, VERSION, pack_header
from kvstore.protocol.message import Message
from kvstore.protocol.transfers import Fetch
from kvstore.testing.transfer.agents import AgentConformance
from kvstore.testing.transfer.connections import ConnectionConformance
from kvstore.transfer.agent import MAX_NOTICES, MAX_NOTICES_BYTES
from kvstore.transfer.paths.path_chooser import PathState
from kvstore.transfer.paths.slices import MAX_PIECES_A_SLICE
from kvstore.transfer.streams.responder import LAST_WORD_S

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "transfer.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", DOCUMENT, re.MULTILINE)]
MESSAGES: list[type[Message]] = [
    kind for kind in vars(transfers).values() if isinstance(kind, type) and kind.__module__ == transfers.__name__
]


def program(name: str) -> str:
    return next(block for block in BLOCKS if block.lstrip().startswith(f"# {name}\n"))


def test_the_two_programs_do_what_the_page_says(tmp_path: Path) -> None:
    for name in ("owner.py", "reader.py"):
        (tmp_path / name).write_text(program(name))
    owner = subprocess.Popen([sys.executable, "owner.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        reader = subprocess.run(
            [sys.executable, "reader.py"], cwd=tmp_path, stdin=owner.stdout, capture_output=True, timeout=120, check=False
        )
        assert (reader.returncode, reader.stderr) == (0, b"")
        _, said = owner.communicate(timeout=120)
    finally:
        owner.kill()
        owner.communicate()
    assert owner.returncode == 0
    assert said == b"[('reader', b'done')] b'answeronques'\n"


def test_the_example_of_a_frame_is_the_frame() -> None:
    body = Fetch([5], [7], [4096], [1 << 20]).pack()
    block = next(block for block in BLOCKS if "header: Fetch" in block)
    shown = "".join(re.sub(r"[ |]", "", re.split(r" {4,}", line)[0]) for line in block.splitlines())
    assert bytes.fromhex(shown) == pack_header(Fetch.TYPE, 1, len(body), deadline_ms=30_000) + body


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_is_described_field_by_field(message: type[Message]) -> None:
    section = re.search(rf"### {message.TYPE} {message.__name__}\n(.*?)(?=\n###|\n## )", DOCUMENT, re.DOTALL)
    assert section is not None
    fields = re.findall(r"^\| (\w+) \| (\w+) \|", section[1], re.MULTILINE)[1:]
    assert fields == list(message.FORM) or "those of Fetch" in section[1]


def test_the_limits_are_those_of_the_code() -> None:
    assert f"protocol version **{VERSION}**" in DOCUMENT
    for name, limit in (
        ("body", transfers.MAX_TRANSFER_BODY_BYTES),
        ("a piece", transfers.MAX_PIECE_BYTES),
        ("payload", MAX_PAYLOAD_BYTES),
        ("notification", transfers.MAX_NOTICE_BYTES),
    ):
        assert f"| {name} | {limit} bytes |" in DOCUMENT
    assert f"| pieces of a request | {transfers.MAX_PIECES} |" in DOCUMENT
    assert f"| notifications that nobody took | {MAX_NOTICES}, and {MAX_NOTICES_BYTES} bytes;" in DOCUMENT
    assert f"with at most {MAX_PIECES_A_SLICE:,} pieces" in DOCUMENT
    assert f"closed at most {LAST_WORD_S:g} s later" in DOCUMENT


def test_the_counters_are_those_of_the_code() -> None:
    table = DOCUMENT.split("## Counters")[1].split("\n## ")[0]
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)[`.]", row)]
    assert names
    assert set(names) <= set(PathState.__slots__)


def test_the_suites_are_where_the_page_says() -> None:
    assert f"from {ConnectionConformance.__module__} import {ConnectionConformance.__name__}" in DOCUMENT
    assert AgentConformance.__name__ in DOCUMENT


def test_what_it_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([\w./]+)", DOCUMENT):
        assert (DOCS / target).exists(), target
