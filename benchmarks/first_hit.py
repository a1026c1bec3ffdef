"""`make bench-first-hit`: time from a fresh clone to the first prompt that vLLM loads from the store, downloads included.

Runs the block of docs/getting-started.md as printed, in a clone of this checkout, but for the model: a small one with random weights, made
beforehand. Needs ports 7440, 7441 and 8000 and, on the disk of temporary files, 6 GB. Rows go to benchmarks/out/first_hit.json.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.harness import run
from kvstore.cli.tools.bench import BenchRow
from tests.engines.live import process_group
from tests.engines.live.environments import ROOT
from tests.engines.live.scripts import block

OUT: Final = Path(__file__).parent / "out" / "first_hit.json"
NAMED: Final = "MODEL=Qwen/Qwen2.5-0.5B-Instruct\n"
NOTED: Final = 'exec 9>"$STEPS"\ntrap \'printf "%s %s\\n" "$EPOCHREALTIME" "$BASH_COMMAND" >&9\' DEBUG\n'
"""Notes each command that bash begins: when, and its text, which may have several lines."""
TIMEOUT_S: Final = 3600


def main() -> int:
    return run({"first_hit": rows}, OUT)


def rows() -> Iterator[BenchRow]:
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", folder / "model", "tiny"], cwd=ROOT, check=True)
        begun_s = time.time()
        subprocess.run(["git", "clone", "-q", ROOT, folder / "kvstore"], check=True)
        cloned_s = time.time()
        said, computed_s = follow(folder)
        steps = [(float(at_s), text) for at_s, text in re.findall(r"^(\d+\.\d+) (.*)$", (folder / "steps").read_text(), re.MULTILINE)]
        cached = [int(count) for count in re.findall(r'"cached_tokens":(\d+)', said)]
        assert len(cached) == 2, said
        assert cached[0] == 0 < cached[1], said
        installed_s = begin_of(steps, "kvstore up")
        asked_s = begin_of(steps, "PROMPT=")
        *_, hit_s = [at_s for at_s, text in steps if text.startswith("sleep 2")]
        yield BenchRow("clone", cloned_s - begun_s, "s")
        yield BenchRow("install, downloads included", installed_s - cloned_s, "s")
        yield BenchRow("install, time of the processor", computed_s, "s")
        yield BenchRow("store and vLLM, until it serves", asked_s - installed_s, "s")
        yield BenchRow("two prompts, the second one loaded", hit_s - asked_s, "s")
        yield BenchRow("from the clone to the first hit", hit_s - begun_s, "s")


def begin_of(steps: list[tuple[float, str]], command: str) -> float:
    """When the one command that begins so was begun."""
    return next(at_s for at_s, text in steps if text.startswith(command))


def follow(folder: Path) -> tuple[str, float]:
    """Run the block in the clone: what it prints, and the processor time of commands that ended, which the store and vLLM did not."""
    script = NOTED + block("getting-started.md", NAMED).replace(NAMED, f"MODEL={folder / 'model'}\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "VLLM_"))} | {
        "HF_HUB_OFFLINE": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "1",  # a machine with a mirror of its own may not reach the index that the page names
        "STEPS": str(folder / "steps"),
        "VLLM_NO_USAGE_STATS": "1",
        "XDG_RUNTIME_DIR": str(folder),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "said").open("w") as said:
        bash = process_group.start(["bash", "-e", "-c", script], cwd=folder / "kvstore", env=environment, stdout=said, stderr=said)
        try:
            status = bash.wait(TIMEOUT_S)
        finally:
            process_group.end(bash)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = (folder / "said").read_text(errors="replace")
    assert status == 0, text
    return text, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
