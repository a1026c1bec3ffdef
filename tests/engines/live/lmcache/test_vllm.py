"""vLLM with its connector for LMCache's server: what one server has stored in kvstore another one loads, and what vLLM makes of a prompt is
what it makes without LMCache."""

import os
from pathlib import Path

import pytest

from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster
from tests.engines.live.environments import python_of
from tests.engines.live.lmcache.test_server import server
from tests.engines.live.pages import configuration
from tests.engines.live.vllm.engines import Engine, random_tokens

BESIDE = Path(__file__).with_name("beside")
CHUNK_TOKENS = 256
CHUNKS = 2
ASKED = random_tokens(1, CHUNKS * CHUNK_TOKENS + 100)


def engine(model: Path, port: int) -> Engine:
    """With what it needs of LMCache from the environment beside its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_LMCACHE", str(next(python_of("lmcache").parents[1].glob("lib/python*/site-packages"))))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(BESIDE), *filter(None, [os.environ.get("PYTHONPATH")])]))
        return Engine(model, transfer=configuration("LMCacheMPConnector", changes={"6555": str(port)}))


def chunks(store: Cluster) -> int:
    with store.control() as control:
        return int(control.status().blocks)


def test_what_one_server_stored_vllm_loads_from_another_one(model: Path, tmp_path: Path) -> None:
    with Engine(model) as plain:
        (right,) = plain.generate(ASKED)
    with cluster(tmp_path) as store:
        store.start_node("--dram", "64MiB")
        with server(store.address, tmp_path / "one.log") as (_, port), engine(model, port) as first:
            first.generate(ASKED)[0].check_same(right, cached=0)
            eventually(lambda: chunks(store) == CHUNKS, "the server has stored the prompt's chunks")
        with server(store.address, tmp_path / "two.log") as (_, port), engine(model, port) as second:
            second.generate(ASKED)[0].check_same(right, cached=CHUNKS * CHUNK_TOKENS)
