"""vLLM's own connector for Mooncake, unmodified, on kvstore under Mooncake's name: another process takes its prefix from the store, and
what comes of a prompt is what comes without one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster
from tests.engines.live.mooncake.package import install
from tests.engines.live.pages import MASTER, command, configuration
from tests.engines.live.vllm.engines import BLOCK_TOKENS, Engine, prompt

LOSING = Path(__file__).with_name("losing")
"""Folder of a package `mooncake` that loses objects between lookup and load."""
BLOCKS = 5
CACHED = BLOCKS * BLOCK_TOKENS


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
    """Return the number of objects that Mooncake's API has put."""
    with store.control() as control:
        return len(list(control.keys("mooncake")))


@pytest.fixture(scope="module")
def transfer() -> dict[str, Any]:
    """Return the configuration that docs/engines.md passes to vLLM."""
    words = command("MOONCAKE_CONFIG_PATH=mooncake.json", "python", changes={})
    found: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return found


def test_a_prompt_that_one_process_computed_is_another_s(
    model: Path, store: Cluster, transfer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, other = prompt(1), prompt(2)
    with Engine(model) as plain:
        right, right_other = plain.generate(asked, other)
    with Engine(model, transfer=transfer) as first:
        (cold,) = first.generate(asked)
        cold.check_same(right, cached=0)
        eventually(lambda: objects(store) >= BLOCKS, "the connector has put the prompt's blocks")
    with Engine(model, transfer=transfer) as second:
        second.generate(asked)[0].check_same(right, cached=CACHED)
        second.forget()
        again, cold = second.generate(asked, other)
        again.check_same(right)
        cold.check_same(right_other)
        assert (again.cached, cold.cached) == (CACHED, 0)
        eventually(lambda: objects(store) >= 2 * BLOCKS, "the connector has put the other prompt's blocks")
    told = store.folder / "lost"
    monkeypatch.setenv("PYTHONPATH", str(LOSING))
    monkeypatch.setenv("TEST_LOST", str(told))
    with Engine(model, transfer=transfer) as losing:
        lost, whole = losing.generate(asked)[0], losing.generate(other)[0]
        lost.check_same(right)
        whole.check_same(right_other)
        assert json.loads(told.read_text()) == [0] * (BLOCKS - 2), "all but the first two were removed before they were loaded"
