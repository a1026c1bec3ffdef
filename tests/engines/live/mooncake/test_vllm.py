"""vLLM's own connector for Mooncake, unmodified, on kvstore under Mooncake's name: another process takes its prefix from the store, and
what comes of a prompt is what comes without one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.transfer.testing.waiting import eventually
from tests.client.processes import Cluster, cluster
from tests.engines.live.mooncake.package import install
from tests.engines.live.pages import MASTER, configuration
from tests.engines.live.tiny_model import make
from tests.engines.live.vllm.engines import BLOCK_TOKENS, Engine, prompt

CONNECTOR = ":MooncakeStoreConnector"
BLOCKS = 5
CACHED = BLOCKS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "model"
    make(folder, "tiny")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Engines that are started meanwhile have the package `mooncake` that is kvstore, and the configuration that docs/engines.md shows."""
    folder = tmp_path_factory.mktemp("store")
    with cluster(folder) as started, pytest.MonkeyPatch.context() as patch:
        started.start_node("--dram", "128MiB")
        config = configuration("metadata_server", changes={MASTER: started.address})
        (folder / "mooncake.json").write_text(json.dumps(config))
        patch.setenv("MOONCAKE_CONFIG_PATH", str(folder / "mooncake.json"))
        patch.setenv("PYTHONPATH", install(folder))
        yield started


def objects(store: Cluster) -> int:
    """How many objects Mooncake's API has put."""
    with store.control() as control:
        return len(list(control.keys("mooncake")))


def test_a_prompt_that_one_process_computed_is_another_s(model: Path, store: Cluster) -> None:
    asked, other = prompt(1), prompt(2)
    with Engine(model) as plain:
        right, right_other = plain.generate(asked, other)
    with Engine(model, store={}, connector=CONNECTOR) as first:
        (cold,) = first.generate(asked)
        cold.check_same(right)
        assert cold.cached == 0
        eventually(lambda: objects(store) >= BLOCKS, "the connector has put the prompt's blocks")
    with Engine(model, store={}, connector=CONNECTOR) as second:
        (warm,) = second.generate(asked)
        warm.check_same(right)
        assert warm.cached == CACHED
        second.forget()
        again, cold = second.generate(asked, other)
        again.check_same(right)
        cold.check_same(right_other)
        assert (again.cached, cold.cached) == (CACHED, 0)
