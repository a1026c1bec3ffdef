"""LMCache's own remote backend for Mooncake, unmodified, on kvstore under Mooncake's name: what one process put another one gets."""

import json
from pathlib import Path

import pytest

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from tests.client.embedded import embedded
from tests.engines.live.child import EngineChild
from tests.engines.live.lmcache.test_connector import FULL, PROGRAM
from tests.engines.live.mooncake.package import install


def child(cluster: LocalCluster, log: Path, path: str, *, headers: bool) -> EngineChild:
    extra = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": cluster.address,
        "protocol": "tcp",
        "save_chunk_meta": headers,
    }
    config = {"remote_url": "mooncakestore://localhost/", "remote_serde": "naive", "max_local_cpu_size": 0.05, "blocking_timeout_secs": 60}
    return EngineChild("lmcache", PROGRAM, json.dumps(config | {"extra_config": extra}), log=log, environment={"PYTHONPATH": path})


@pytest.mark.parametrize("headers", [True, False], ids=["with headers", "without headers"])
def test_another_engine_gets_what_one_has_put(tmp_path: Path, *, headers: bool) -> None:
    path = install(tmp_path)
    with (
        embedded(ClusterPlan(dram="64MiB", is_private=True)) as cluster,
        child(cluster, tmp_path / "one", path, headers=headers) as one,
        child(cluster, tmp_path / "two", path, headers=headers) as two,
    ):
        one.ask("put", names=[1, 2, 3], tokens=[FULL, FULL, FULL])
        assert two.ask("contains", names=[1, 2, 3, 4])["one"] == [True, True, True, False]
        assert two.ask("get", names=[3, 4, 1]) == [[FULL, 3.0, 1], None, [FULL, 1.0, 1]]
