"""examples/prefix_cache.py runs and keeps what it prints."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra examples")]
EXAMPLE = Path(__file__).parents[2] / "examples" / "prefix_cache.py"


def test_documents_from_every_tier_give_the_same_logits(tmp_path: Path) -> None:
    # One thread: two that wait for one another at every step take many times as long where others use the machine too.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--quick", "--plots", str(tmp_path / "plots")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    read = re.search(r"Blocks read: ([\d,]+) from hbm, ([\d,]+) from dram, ([\d,]+) from nvme", done.stdout)
    assert read is not None, done.stdout
    blocks = (128 + 512) // 16
    assert all(int(count.replace(",", "")) >= blocks for count in read.groups())
    rows = re.findall(r"│ +([\d,]+) │ +[\d,.]+ │ +[\d,.]+ │ +[\d,.]+ │ +[\d,.]+ │ +-?\d+% │ +(\S+) │", done.stdout)
    assert [tokens for tokens, _ in rows] == ["144", "528"]
    assert all(float(difference) <= 1e-4 for _, difference in rows)
    assert "Checked: with the cache each first token is the same" in done.stdout
    blind = re.search(r"a question without its document: by ([\d.]+) or more", done.stdout)
    assert blind is not None
    assert float(blind[1]) > 0.1, "the check would notice a cache that is not the document's"
    assert (tmp_path / "plots" / "ttft.svg").read_text().startswith("<?xml")


def test_without_what_it_needs_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "prefix_cache.py: error: torch and transformers are missing: pip install '.[examples]'\n"
