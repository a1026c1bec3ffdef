"""docs/router.md's two vLLM servers behind kvstore-router, run as printed but for the model and what is installed."""

import json
import random
import subprocess
import sys
from pathlib import Path

from tests.engines.live.environments import ROOT
from tests.engines.live.scripts import PATIENCE_S, block, running
from tests.namespaces import TwoHosts
from tests.system.running import until

URL = "http://127.0.0.1:8000"
BLOCKS, BLOCK_TOKENS = 6, 32


def ask(hosts: TwoHosts, *arguments: str) -> str:
    """The answer, with its head; "" while nothing listens."""
    try:
        return hosts.run(0, ["curl", "-isS", "--max-time", "120", *arguments], timeout_s=150)
    except RuntimeError:
        return ""


def test_prompt_is_found_where_it_was_computed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", tmp_path / "model", "tiny"], cwd=ROOT, check=True)
    script = block("router.md", "python -m vllm").replace("MODEL", str(tmp_path / "model"))
    numbers = random.Random(1)
    prompt = [numbers.randrange(3, 1000) for _ in range(BLOCKS * BLOCK_TOKENS + 7)]
    body = json.dumps({"model": str(tmp_path / "model"), "prompt": prompt, "max_tokens": 1, "temperature": 0})

    with running(script, tmp_path) as (hosts, bash):

        def prefix_blocks() -> int:
            said = (tmp_path / "said").read_text(errors="replace")
            assert bash.poll() is None, said
            assert "kvstore: error: " not in said, said  # a command in the background, after which bash goes on
            head = ask(hosts, f"{URL}/v1/completions", "-H", "content-type: application/json", "-d", body).lower()
            decisions = [line.partition(": ")[2] for line in head.splitlines() if line.startswith("x-kvstore-decision: ")]
            return int(json.loads(decisions[0])["prefix_blocks"]) if decisions else 0

        until(lambda: prefix_blocks() == BLOCKS, "the router sends the prompt where its blocks are", PATIENCE_S)
