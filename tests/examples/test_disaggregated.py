"""examples/disaggregated.py runs as users run it, and everything it claims holds."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from disaggregation.stage import Scale, Stage
from disaggregation.story import half_told, stories
from disaggregation.workers import Workers
from rich.console import Console

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "disaggregated.py"
TOKEN_BYTES = 2 * 4 * 2 * 32 * 4


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra examples")
@pytest.mark.timeout(900)  # half a minute on two idle cores
def test_prefill_and_decode_apart_are_one_model() -> None:
    # It returns once no process holds its standard output: no process is left behind.
    done = subprocess.run([sys.executable, str(EXAMPLE), "--quick"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert (done.stdout.count("✔"), done.stdout.count("NOT SO")) == (10, 0)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line.startswith("│")]
    shardings, prefixes, schemes = rows[:4], rows[4:6], rows[6:]
    assert [(row[0], row[1]) for row in shardings] == [
        ("TP 1 x PP 2", "TP 1"),
        ("TP 2 x PP 2", "TP 1"),
        ("TP 2 x PP 2", "TP 2"),
        ("TP 2 x PP 2", "TP 4"),
    ]
    assert [number(row[4]) for row in shardings] == [500 * TOKEN_BYTES * copies for copies in (1, 1, 1, 2)]
    assert {row[6] for row in shardings} | {row[5] for row in prefixes} == {"bit-equal"}
    assert [row[8] for row in shardings] == ["bit-equal", "rounding", "rounding", "rounding"]
    assert [row[:4] for row in prefixes] == [
        ["200", "200", f"{200 * TOKEN_BYTES * 2:,}", "0"],
        ["204", "44", f"{44 * TOKEN_BYTES * 2:,}", "160"],
    ]
    assert [(row[0], row[1]) for row in schemes] == [("int8", "8.5"), ("int4/32", "5"), ("no context", "")]
    assert [number(row[2]) * 8 for row in schemes[:2]] == [2 * 256 * TOKEN_BYTES // 4 * bits for bits in (8.5, 5)]
    perplexities = [float(row[8]) for row in schemes]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-3)
    assert perplexities[0] < perplexities[2], "what the facts were must matter to whoever tells them again"


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_a_claim_that_does_not_hold_is_not_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scale = Scale(training_steps=0, decoded_tokens=0, schemes=(), texts=0)
    stage = Stage(console=Console(width=80), scale=scale, single=Workers("none", []), weights=tmp_path, folder=tmp_path)
    stage.claim("one is two", False)
    stage.claim("one is one", True)
    assert not stage.is_right
    assert capsys.readouterr().out.split("\n")[:2] == ["   ✘ NOT SO: one is two", "   ✔ one is one"]


def test_texts_are_deterministic_and_end_after_the_facts() -> None:
    assert stories(50, seed=1) == stories(400, seed=1)[:50]
    context, rest = half_told(3, context_tokens=256)
    assert (context, rest) == half_told(3, context_tokens=256)
    assert len(context) == 256
    told, again = bytes(context).decode().rpartition("\n")[2], bytes(rest).decode()
    facts = re.findall(r"(\w+) the (\w+) of (\w+) keeps (\w+)\.", told)
    assert len(facts) == 3
    assert sorted(re.findall(r"(\w+) is a (\w+) and lives in (\w+) with (\w+)\.", again)) == sorted(facts)
