"""Engines take the commands that README.md and the pages print for them: their own parsers and configurations judge each one.

Two pages are run as printed but for the model and what is installed: docs/getting-started.md's way from a checkout to a first hit in vLLM,
and docs/router.md's two vLLM servers behind kvstore-router. tests/engines/live/vllm/server.py and others run most other commands.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.docs.shell_blocks import Command, all_commands
from tests.engines.live.conftest import make_model
from tests.engines.live.environments import ROOT, python_of
from tests.engines.live.scripts import PATIENCE_S, block, running
from tests.engines.live.vllm.engines import BLOCK_TOKENS, prompt
from tests.namespaces import TwoHosts
from tests.system.running import until

CHILD = Path(__file__).with_name("parsing_child.py")
CPU = Path(__file__).parent / "sglang" / "cpu"
"""Folder of stand-ins for packages that SGLang requires and a CPU lacks."""
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
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory, "heads")


def complaints(engine: str, lines: list[list[str]]) -> list[str]:
    """Return the engine's error message for each command line, "" if it accepts it."""
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
def test_engine_takes_its_documented_commands(engine: str, wide_model: Path) -> None:
    """And refuses a flag that it does not have, or this test would see nothing."""
    commands = documented(engine)
    assert commands
    lines = [[str(wide_model) if "MODEL" in word or word.startswith("Qwen/") else word for word in command.words] for command in commands]
    *found, refused = complaints(engine, [*lines, [*lines[0], "--no-such-flag", "1"]])
    for command, said in zip(commands, found, strict=True):
        assert not said, f"{command.block.name}: {shlex.join(command.words)}: {said}"
    assert "no-such-flag" in refused


NAMED = "MODEL=Qwen/Qwen2.5-0.5B-Instruct\n"
PROMPT = "".join(f"Chapter {number} of a long document. " for number in range(1, 31))
PAUSE = "sleep 2 "


def test_second_answer_comes_from_the_store(model: Path, tmp_path: Path) -> None:
    tokens = 1 + len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(PROMPT))  # vLLM adds <s>
    stored = tokens // BLOCK_TOKENS
    until_stored = f"until kvstore namespaces --json | grep -q '\"blocks\": {stored},'; do sleep 0.5; done "
    script = block("getting-started.md", NAMED)
    for old, new in ((NAMED, f"MODEL={model}\n"), (PAUSE, until_stored)):
        assert script.count(old) == 1
        script = script.replace(old, new)
    with running(script, tmp_path) as (_, bash):
        status = bash.wait()
    said = (tmp_path / "said").read_text(errors="replace")
    assert status == 0, said + (tmp_path / "vllm.log").read_text(errors="replace")
    answers = re.findall(r'"prompt_tokens":(\d+),.*?"cached_tokens":(\d+)', said)
    assert answers == [(str(tokens), "0"), (str(tokens), str(stored * BLOCK_TOKENS))]


URL = "http://127.0.0.1:8000"
PROMPT_BLOCKS = 6


def head_of(hosts: TwoHosts, *arguments: str) -> str:
    """The answer, with its head; "" while nothing listens."""
    try:
        return hosts.run(0, ["curl", "-isS", "--max-time", "120", *arguments], timeout_s=150)
    except RuntimeError:
        return ""


def test_prompt_is_found_where_it_was_computed(model: Path, tmp_path: Path) -> None:
    script = block("router.md", "python -m vllm").replace("MODEL", str(model))
    body = json.dumps({"model": str(model), "prompt": prompt(1, PROMPT_BLOCKS), "max_tokens": 1, "temperature": 0})

    with running(script, tmp_path) as (hosts, bash):

        def prefix_blocks() -> int:
            said = (tmp_path / "said").read_text(errors="replace")
            assert bash.poll() is None, said
            assert "kvstore: error: " not in said, said  # a command in the background, after which bash goes on
            head = head_of(hosts, f"{URL}/v1/completions", "-H", "content-type: application/json", "-d", body).lower()
            decisions = [line.partition(": ")[2] for line in head.splitlines() if line.startswith("x-kvstore-decision: ")]
            return int(json.loads(decisions[0])["prefix_blocks"]) if decisions else 0

        until(lambda: prefix_blocks() == PROMPT_BLOCKS, "the router sends the prompt where its blocks are", PATIENCE_S)
