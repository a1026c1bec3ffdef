"""A whole SGLang engine with HiCache over our back end, on a CPU: what it has forgotten it takes from the store, and says the same."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from kvstore.client.tools.cluster import ClusterPlan
from tests.client.embedded import embedded
from tests.engines.live.child import EngineChild
from tests.engines.live.environments import python_of
from tests.engines.live.sglang.hicache import FOLDER, extra_config, path

PROMPT = list(range(3, 203))
PAGE = 16
PAGES = len(PROMPT) // PAGE


@pytest.mark.timeout(1200)
def test_an_engine_that_forgot_a_prefix_takes_it_from_the_store_and_says_the_same(tmp_path: Path) -> None:
    model, environment = tmp_path / "model", path() | {"HF_HUB_OFFLINE": "1"}
    maker: list[str | Path] = [python_of("sglang"), FOLDER.parent / "tiny_model.py", model, "tiny"]
    subprocess.run(maker, check=True, env=os.environ | environment)
    with embedded(ClusterPlan(dram="64MiB", is_private=True)) as cluster, cluster.control() as control:
        # Its lookups may take as long as a busy machine makes them.
        extra = json.dumps(extra_config(cluster.address, prefetch_threshold=16, lookup_deadline_s=30, model="tiny"))
        program = FOLDER / "engine_child.py"
        with EngineChild("sglang", program, str(model), extra, log=tmp_path / "log", environment=environment) as engine:
            cold = engine.ask("generate", prompt=PROMPT, tokens=8)
            while control.status().blocks < PAGES:  # the engine writes behind, and tells nobody
                time.sleep(0.1)
            assert engine.ask("forget") is True
            hit = engine.ask("generate", prompt=PROMPT, tokens=8)
    assert cold["cached"] == 0
    assert hit["cached"] == PAGES * PAGE
    assert hit["tokens"] == cold["tokens"]
