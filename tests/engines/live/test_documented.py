"""Engines take the commands that README.md and the pages print for them: their own parsers and configurations judge each one.

No engine starts here. tests/engines/live/vllm/server.py, router/test_documented.py and others run most of these commands.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.shell_blocks import Command, all_commands
from tests.engines.live.environments import ROOT, python_of

CHILD = Path(__file__).with_name("parsing_child.py")
CPU = Path(__file__).parent / "sglang" / "cpu"
"""What SGLang asks for and a CPU lacks."""
FIRST = {"vllm": ("python", "-m", "vllm."), "sglang": ("python", "-m", "sglang."), "lmcache": ("lmcache",)}
"""The first words of an engine's commands; the last one is the beginning of a word."""


def documented(engine: str) -> list[Command]:
    first = FIRST[engine]
    return [
        command
        for command in all_commands()
        if command.words[: len(first) - 1] == first[:-1] and command.words[len(first) - 1].startswith(first[-1])
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "model"
    subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", folder, "heads"], cwd=ROOT, check=True)
    return folder


def complaints(engine: str, lines: list[list[str]]) -> list[str]:
    """What the engine says of each command line, "" if it takes it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    done = subprocess.run(
        [python_of(engine), CHILD, engine],
        input=json.dumps(lines),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(CPU) if engine == "sglang" else ""},
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("engine", FIRST)
def test_engine_takes_its_documented_commands(engine: str, model: Path) -> None:
    """And refuses a flag that it does not have, or this test would see nothing."""
    commands = documented(engine)
    assert commands
    lines = [[str(model) if "MODEL" in word or word.startswith("Qwen/") else word for word in command.words] for command in commands]
    *found, refused = complaints(engine, [*lines, [*lines[0], "--no-such-flag", "1"]])
    for command, said in zip(commands, found, strict=True):
        assert not said, f"{command.block.name}: {shlex.join(command.words)}: {said}"
    assert "no-such-flag" in refused
