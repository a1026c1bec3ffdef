"""Promises of docs/transfer.md: its examples run as they stand there, and its bytes are those of the code."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from kvstore.protocol.frames import pack_header
from kvstore.protocol.transfers import ReadRegions

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "transfer.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", DOCUMENT, re.MULTILINE)]


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
    body = ReadRegions([5], [7], [4096], [1 << 20]).pack()
    block = next(block for block in BLOCKS if "header: Fetch" in block)
    shown = "".join(re.sub(r"[ |]", "", re.split(r" {4,}", line)[0]) for line in block.splitlines())
    assert bytes.fromhex(shown) == pack_header(ReadRegions.TYPE, 1, len(body), deadline_ms=30_000) + body
