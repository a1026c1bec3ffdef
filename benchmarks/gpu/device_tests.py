"""Suites that run on the device, by pytest: one row for each, and one for each test that failed."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from kvstore.cli.tools.bench import BenchRow

ROOT: Final = Path(__file__).resolve().parents[2]
CODECS: Final = "tests/kvcache/codecs"
WORKERS: Final = 8
MAX_NAMED: Final = 12


def tier_rows() -> Iterator[BenchRow]:
    """Tests marked gpu of all files but the codecs'; and all of the HBM tier's, on any device."""
    files = [name for name in files_marked() if not name.startswith(CODECS)]
    yield from suite("tests marked gpu", files, marked=True, workers=4)
    yield from suite("the HBM tier's suites", ["tests/tiers/test_hbm.py"], marked=False, workers=1)


def codec_rows() -> Iterator[BenchRow]:
    """Tests of the codecs; each compiles some kernels, hence the workers."""
    yield from suite("codecs on the device", [name for name in files_marked() if name.startswith(CODECS)], marked=True, workers=WORKERS)


def files_marked() -> list[str]:
    """Test files with the mark, without importing any: many need packages that only `make test` installs."""
    mark = re.compile(r"^\s*(@|pytestmark = )(pytest\.mark\.gpu|needs_cuda|on_device)\b", re.MULTILINE)
    found = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if mark.search(path.read_text(encoding="utf-8")))
    return [str(path.relative_to(ROOT)) for path in found]


def suite(name: str, files: list[str], *, marked: bool, workers: int) -> Iterator[BenchRow]:
    """Run pytest on the files. Versions that this project does not pin may warn, hence -W."""
    with tempfile.TemporaryDirectory(prefix="kvstore-gpu-") as folder:
        told = Path(folder, "told.xml")
        options = ("-p", "no:cacheprovider", "-W", "default", "--timeout", "60", "-v", "-ra", f"--junitxml={told}")
        command = [sys.executable, "-m", "pytest", *options]
        if workers > 1 and importlib.util.find_spec("xdist"):
            command += ["-n", str(min(workers, os.cpu_count() or 1)), "--dist", "worksteal"]
        done = subprocess.run([*command, *(["-m", "gpu"] if marked else []), *files], cwd=ROOT, check=False)
        if not told.exists():
            yield BenchRow(f"{name}: pytest ended with status {done.returncode}", 0, "failed", "complete", False)
            return
        yield from told_rows(name, told)


def told_rows(name: str, told: Path) -> Iterator[BenchRow]:
    """Rows of a JUnit report."""
    cases = list(ElementTree.parse(told).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    yield BenchRow(f"{name}: passed", len(cases) - len(failed) - len(skipped), "tests", "none fails", not failed)
    if skipped:
        reasons = sorted({str(reason.get("message")) for case in skipped for reason in case.iter("skipped")})
        yield BenchRow(f"{name}: skipped, {'; '.join(reasons)[:200]}", len(skipped), "tests")
    for case in failed[:MAX_NAMED]:
        message = next(str(part.get("message")) for part in case if part.tag in ("failure", "error"))
        yield BenchRow(f"{case.get('classname')}.{case.get('name')}: {' '.join(message.split())[:200]}", 0, "failed", "passes", False)
