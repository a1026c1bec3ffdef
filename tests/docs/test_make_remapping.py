"""Promise of docs/make_remapping.py: docs/remapping.svg is what it prints, and shows the plan that the code makes."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from kvstore.kvcache.layouts.formatter import remap
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_that_of_the_code() -> None:
    made = subprocess.run([sys.executable, str(DOCS / "make_remapping.py")], capture_output=True, text=True, check=True)
    assert made.stdout == (DOCS / "remapping.svg").read_text(encoding="utf-8"), "run: python docs/make_remapping.py > docs/remapping.svg"


def test_a_band_is_a_run() -> None:
    spec = CacheSpec(layers=4, kv_heads=4, head_dim=128, block_tokens=16)
    source, destination = (CacheLayout(spec=spec, parallel=sizes, pool_blocks=1) for sizes in (Parallel(tp=2, pp=2), Parallel(tp=4)))
    plan = remap(source, destination)
    runs = sum(len(plan.copies(*pair[:2], [0], [0]).length) for pair in plan.pairs)
    root = ElementTree.parse(DOCS / "remapping.svg").getroot()
    bands = [path for path in root.iter(f"{SVG}path") if path.get("class") == "run"]
    assert len(bands) == runs == 32
