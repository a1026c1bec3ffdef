"""LMCache's own remote backend over our connector and a real cluster, in LMCache's environment.

Chunks arrive, and memory is released.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.client import Client
from tests.client.embedded import embedded
from tests.engines.live.child import EngineChild
from tests.engines.live.conftest import PLAN

PROGRAM = Path(__file__).with_name("remote_child.py")
FULL = 16
"""Tokens of a chunk."""
LAYERS, HEADS = 4, 2
"""Of a rank, as in remote_child.py."""


class Form(NamedTuple):
    """Form of an engine's cache."""

    dtype: str = "float32"
    split: tuple[int, int] = LAYERS, HEADS
    """Layers and KV heads of its rank."""


def child(cluster: LocalCluster, log: Path, form: Form | None = None, **extra: Any) -> EngineChild:
    form = form or Form()
    entries = {
        "remote_storage_plugin.kvstore.module_path": "kvstore.engines.lmcache.connector",
        "remote_storage_plugin.kvstore.class_name": "KVStoreConnectorAdapter",
        "remote_storage_plugin.kvstore.master": cluster.address,
        "remote_storage_plugin.kvstore.lookup_deadline_s": 30,
    }
    config = {"remote_storage_plugins": ["kvstore"], "remote_serde": "naive", "max_local_cpu_size": 0.05, "blocking_timeout_secs": 60}
    return EngineChild(
        "lmcache", PROGRAM, json.dumps(config | {"dtype": form.dtype, "split": form.split, "extra_config": entries | extra}), log=log
    )


@pytest.fixture(scope="module", params=[True, False], ids=["with headers", "without headers"])
def engines(
    request: pytest.FixtureRequest, cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineChild, EngineChild]]:
    """Two engines' processes on one store."""
    folder = tmp_path_factory.mktemp("engines")
    with (
        child(cluster, folder / "one", save_chunk_meta=request.param) as one,
        child(cluster, folder / "two", save_chunk_meta=request.param) as two,
    ):
        yield one, two


def test_another_engine_gets_what_one_has_put(engines: tuple[EngineChild, EngineChild]) -> None:
    one, two = engines
    assert one.ask("put", names=[1, 2, 3], tokens=[FULL, FULL, FULL]) == {"told": True, "references": [1, 1, 1]}
    assert two.ask("contains", names=[1, 2, 3, 4, 1]) == {"one": [True, True, True, False, True], "leading": 3, "async": 3}
    assert two.ask("get", names=[3, 4, 1]) == [[FULL, 3.0, 1], None, [FULL, 1.0, 1]]
    assert two.ask("get_one", name=2) == [FULL, 2.0, 1]
    assert two.ask("prefetch", names=[1, 2, 4, 3]) == [[FULL, 1.0, 1], [FULL, 2.0, 1]]


def test_a_last_chunk_that_is_not_full_keeps_its_shape(engines: tuple[EngineChild, EngineChild]) -> None:
    one, two = engines
    one.ask("put", names=[11, 12], tokens=[FULL, 5])
    assert two.ask("get", names=[11, 12]) == [[FULL, 11.0, 1], [5, 12.0, 1]]


def test_chunks_of_another_tag_are_others(engines: tuple[EngineChild, EngineChild]) -> None:
    one, two = engines
    one.ask("put", names=[21], tokens=[FULL], tag="ann")
    assert two.ask("contains", names=[21], tag="bob")["leading"] == 0
    assert two.ask("contains", names=[21])["leading"] == 0
    assert two.ask("get", names=[21], tag="ann") == [[FULL, 21.0, 1]]


def test_a_removed_chunk_is_a_miss(engines: tuple[EngineChild, EngineChild]) -> None:
    one, two = engines
    one.ask("put", names=[31], tokens=[FULL])
    assert two.ask("get", names=[31]) == [[FULL, 31.0, 1]]
    assert one.ask("remove", name=31) is True
    assert one.ask("remove", name=31) is False
    assert two.ask("get", names=[31]) == [None]


def test_memory_is_released_after_its_job_despite_cancellation(engines: tuple[EngineChild, EngineChild]) -> None:
    one, _ = engines
    one.ask("put", names=[41], tokens=[FULL])
    assert one.ask("cancelled_get", name=41) == 0
    assert one.ask("get", names=[41]) == [[FULL, 41.0, 1]]


@pytest.mark.parametrize("tokens", [FULL - 1, FULL + 1])
def test_chunk_with_wrong_length_in_header_is_a_miss(cluster: LocalCluster, tmp_path: Path, tokens: int) -> None:
    with child(cluster, tmp_path / "log", save_chunk_meta=True) as engine:
        engine.ask("put", names=[51], tokens=[FULL])
        assert engine.ask("get_misdescribed", name=51, tokens=tokens) == {"seen": [None], "references": [0, 0]}
        assert engine.ask("get", names=[51]) == [[FULL, 51.0, 1]]


def test_quantised_caches_share_by_the_setting_dtype(cluster: LocalCluster, tmp_path: Path) -> None:
    """LMCache knows the caches of all three engines as uint8. Without the setting an engine runs without the store."""
    with (
        child(cluster, tmp_path / "one", Form("uint8"), **{"remote_storage_plugin.kvstore.dtype": "fp8_e4m3"}) as one,
        child(cluster, tmp_path / "two", Form("uint8"), **{"remote_storage_plugin.kvstore.dtype": "fp8_e5m2"}) as two,
        child(cluster, tmp_path / "untold", Form("uint8")) as untold,
    ):
        one.ask("put", names=[71], tokens=[FULL])
        assert [engine.ask("contains", names=[71])["one"] for engine in (one, two, untold)] == [[True], [False], [False]]
    assert "LMCache calls the cache's element type uint8" in (tmp_path / "untold").read_text()


def test_ranks_of_other_layers_and_heads_share_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    """Rank 0 of TP 2 and rank 0 of PP 2: LMCache's keys and the chunks' sizes are equal."""
    halves = child(cluster, tmp_path / "tp"), child(cluster, tmp_path / "pp", Form(split=(LAYERS // 2, HEADS * 2)), save_chunk_meta=False)
    with halves[0] as heads, halves[1] as layers, child(cluster, tmp_path / "plain", save_chunk_meta=False) as plain:
        plain.ask("put", names=[81], tokens=[FULL])
        heads.ask("put", names=[82], tokens=[FULL])
        assert layers.ask("contains", names=[81, 82])["one"] == [False, False]
        assert plain.ask("contains", names=[81])["one"] == [True]


def test_hints_of_requests_reach_the_store(cluster: LocalCluster, tmp_path: Path) -> None:
    allowed = {"remote_storage_plugin.kvstore.retention_from_requests": True}
    with child(cluster, tmp_path / "log", None, **allowed) as engine, Client(cluster.address) as client:
        engine.ask("put", names=[61, 62, 63], tokens=[FULL] * 3, hint={"session": "lmcache", "priority": "high"})
        assert engine.ask("get", names=[61], hint={"session": "another"}) == [[FULL, 61.0, 1]]
        assert client.end_session("lmcache") == 2


def test_a_store_that_is_gone_is_misses_and_the_engine_goes_on(tmp_path: Path) -> None:
    with embedded(PLAN) as cluster, child(cluster, tmp_path / "log") as engine:
        engine.ask("put", names=[1], tokens=[FULL])
        assert engine.ask("ping") == 0
        cluster.kill_node(0)
        os.kill(cluster.master_pid, signal.SIGKILL)
        while engine.ask("contains", names=[1, 2])["leading"]:
            pass  # what a node that has just died shows on its host counts for 0.1 s more
        assert engine.ask("get", names=[1, 2]) == [None, None]
        assert engine.ask("contains", names=[1, 2]) == {"one": [False, False], "leading": 0, "async": 0}
        assert engine.ask("put", names=[3], tokens=[FULL]) == {"told": True, "references": [1]}
        assert engine.ask("remove", name=1) is False
        assert engine.ask("ping") != 0
        assert engine.ask("end") == {}
