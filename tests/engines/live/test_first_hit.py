"""docs/getting-started.md's way from a checkout to a first hit in vLLM, run as printed but for the model and what is installed."""

import re
import subprocess
import sys
from pathlib import Path

from tests.engines.live.environments import ROOT
from tests.engines.live.scripts import block, running

NAMED = "MODEL=Qwen/Qwen2.5-0.5B-Instruct\n"
BLOCK_TOKENS = 32
TOKENS = 449
"""Of the prompt, by the tokenizer of the tiny model."""
STORED = TOKENS // BLOCK_TOKENS
PAUSE = "sleep 2 "
UNTIL_STORED = f"until kvstore namespaces --json | grep -q '\"blocks\": {STORED},'; do sleep 0.5; done "


def test_second_answer_comes_from_the_store(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", tmp_path / "model", "tiny"], cwd=ROOT, check=True)
    script = block("getting-started.md", NAMED)
    for old, new in ((NAMED, f"MODEL={tmp_path / 'model'}\n"), (PAUSE, UNTIL_STORED)):
        assert script.count(old) == 1
        script = script.replace(old, new)
    with running(script, tmp_path) as (_, bash):
        status = bash.wait()
    said = (tmp_path / "said").read_text(errors="replace")
    assert status == 0, said + (tmp_path / "vllm.log").read_text(errors="replace")
    answers = re.findall(r'"prompt_tokens":(\d+),.*?"cached_tokens":(\d+)', said)
    assert answers == [(str(TOKENS), "0"), (str(TOKENS), str(STORED * BLOCK_TOKENS))]
