"""SGLang's own host pools and cache controller over our back end and a real cluster, in SGLang's environment, on a CPU."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.cli.tools.cluster import LocalCluster
from tests.client.embedded import embedded
from tests.engines.live.child import EngineChild
from tests.engines.live.conftest import PLAN
from tests.engines.live.sglang.hicache import child, use

PAGE = 16
"""Tokens."""
Two = tuple[EngineChild, EngineChild]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("engines")
    one, two = child(folder / "one"), child(folder / "two")
    with one, two:
        yield one, two


@pytest.fixture(params=["mha page_first", "mha layer_first", "mla page_first", "mla layer_first"])
def engines(request: pytest.FixtureRequest, cluster: LocalCluster, processes: Two) -> Two:
    """Two processes with pools of one kind and layout, a controller each, and back ends of three ranks; no other test has their pages."""
    kind, layout = request.param.split()
    for each in processes:
        use(each, cluster.address, layout=layout, kind=kind, salt=request.node.name)
        assert each.ask("attach") == "_page_get_zero_copy"
        assert (each.ask("open"), each.ask("open", tp=[0, 2]), each.ask("open", tp=[1, 2])) == (0, 1, 2)
    return processes


def opened(engine: EngineChild, cluster: LocalCluster, **how: Any) -> None:
    """With one back end, of the only rank."""
    use(engine, cluster.address, **how)
    assert engine.ask("open") == 0


def hashes(*names: int) -> list[str]:
    return [f"{name:064x}" for name in names]


def test_another_process_prefetches_stored_pages(engines: Two) -> None:
    one, two = engines
    written = one.ask("backup", first=0, pages=6, seed=1)
    assert written["tokens"] == 6 * PAGE
    assert len(set(written["digests"])) == 6
    assert two.ask("prefetch", first=0, pages=6) == {"found": 6 * PAGE, "read": 6 * PAGE, "digests": written["digests"]}
    assert two.ask("prefetch", first=0, pages=8)["read"] == 6 * PAGE
    assert two.ask("prefetch", first=7, pages=4) == {"found": 0, "read": 0, "digests": []}


def test_pages_are_read_in_place_and_misses_reported(engines: Two) -> None:
    one, two = engines
    assert one.ask("set", storage=0, keys=hashes(1, 2, 4), seed=2) == [True, True, True]
    assert two.ask("exists", storage=0, keys=hashes(1, 2, 3, 4)) == 2
    nothing = two.ask("get", storage=0, keys=hashes(99))[0][1]
    first, second, missing, fourth = two.ask("get", storage=0, keys=hashes(1, 2, 3, 4))
    assert [each[0] for each in (first, second, missing, fourth)] == [True, True, False, True]
    assert missing[1] == nothing
    assert [first, second, fourth] == one.ask("get", storage=0, keys=hashes(1, 2, 4))
    assert one.ask("set", storage=0, keys=hashes(1, 2), seed=3) == [True, True], "pages that are there are stored"
    assert two.ask("get", storage=0, keys=hashes(1))[0] == first, "and stay what they were"
    assert [each.ask("kept", storage=0) for each in engines] == [0, 0], "nobody asks for jobs that are over"


def test_ranks_share_pages_only_where_they_hold_the_same(engines: Two, request: pytest.FixtureRequest) -> None:
    one, two = engines
    one.ask("set", storage=1, keys=hashes(11), seed=4)
    is_replicated = "mla" in request.node.name
    assert two.ask("exists", storage=1, keys=hashes(11)) == 1
    assert two.ask("exists", storage=2, keys=hashes(11)) == is_replicated
    assert two.ask("exists", storage=0, keys=hashes(11)) == is_replicated


def test_pools_beside_the_primary_one_have_pages_of_their_own(engines: Two) -> None:
    one, two = engines
    keys = hashes(21, 22, 23, 24)
    one.ask("set", storage=0, keys=keys, seed=5)
    assert two.ask("exists_v2", storage=0, keys=keys, policy="all_pages", window=4) == {"pages": 0, "pools": {"kv": 4}, "restorable": []}
    assert one.ask("set", storage=0, keys=hashes(21, 23, 24), seed=6, pool="swa") == [True, True, True]
    everything = two.ask("exists_v2", storage=0, keys=keys, policy="all_pages", window=4)
    assert everything == {"pages": 1, "pools": {"kv": 4, "swa": 1}, "restorable": [1]}
    window = two.ask("exists_v2", storage=0, keys=keys, policy="trailing_pages", window=2)
    assert window == {"pages": 4, "pools": {"kv": 4, "swa": 4}, "restorable": [1, 4]}
    read = two.ask("get", storage=0, keys=keys, pool="swa")
    assert [each[0] for each in read] == [True, False, True, True]
    assert read == one.ask("get", storage=0, keys=keys, pool="swa")
    assert two.ask("get", storage=0, keys=hashes(23), pool="kv") == two.ask("get", storage=0, keys=hashes(23))
    assert two.ask("get", storage=0, keys=hashes(23)) != two.ask("get", storage=0, keys=hashes(23), pool="swa")


def test_calls_that_make_no_sense_are_misses(engines: Two) -> None:
    assert engines[0].ask("nonsense", storage=0) == [[False, False], [False], 0, [], None, False]


def test_another_layout_is_not_shared(cluster: LocalCluster, processes: Two) -> None:
    pages, layers = processes
    for each, layout in ((pages, "page_first"), (layers, "layer_first")):
        opened(each, cluster, layout=layout, salt="layouts")
    assert pages.ask("set", storage=0, keys=hashes(1), seed=1) == [True]
    assert pages.ask("exists", storage=0, keys=hashes(1)) == 1
    assert layers.ask("exists", storage=0, keys=hashes(1)) == 0


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_element_types_of_equal_storage_share_nothing(cluster: LocalCluster, processes: Two, kind: str) -> None:
    """SGLang stores both as uint8."""
    for each, dtype, name in zip(processes, ("float8_e4m3fn", "float8_e5m2"), ("fp8_e4m3", "fp8_e5m2"), strict=True):
        each.ask("tell", kv_cache_dtype=name)
        opened(each, cluster, kind=kind, dtype=dtype, salt=f"fp8 {kind}")
    one, two = processes
    assert one.ask("set", storage=0, keys=hashes(1), seed=1) == [True]
    assert [each.ask("exists", storage=0, keys=hashes(1)) for each in processes] == [1, 0]
    assert two.ask("get", storage=0, keys=hashes(1))[0][0] is False
    for each in processes:
        each.ask("tell")


@pytest.mark.parametrize(
    "told",
    [
        {"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'},
        {"quantization": "fp8"},
        {"quantization_param_path": "scales.json"},
        {"revision": "a1"},
        {"load_format": "dummy"},
    ],
)
def test_engine_with_other_arithmetic_shares_nothing(cluster: LocalCluster, processes: Two, told: dict[str, Any]) -> None:
    one, two = processes
    for each, arguments in ((one, {}), (two, told)):
        each.ask("tell", **arguments)
        opened(each, cluster, salt=str(told))
    assert one.ask("set", storage=0, keys=hashes(1), seed=1) == [True]
    assert two.ask("exists", storage=0, keys=hashes(1)) == 0
    two.ask("tell")
    opened(two, cluster, salt=str(told))
    assert two.ask("exists", storage=0, keys=hashes(1)) == 1


def test_unreachable_store_is_misses_for_the_controller(processes: Two) -> None:
    engine = processes[0]
    with embedded(PLAN) as cluster:
        use(engine, cluster.address, load_deadline_s=5)
        engine.ask("attach")
        engine.ask("open")
        assert engine.ask("backup", first=0, pages=2, seed=1)["tokens"] == 2 * PAGE
        assert engine.ask("set", storage=0, keys=hashes(1), seed=1) == [True]
        cluster.kill_node(0)
        os.kill(cluster.master_pid, signal.SIGKILL)
        assert engine.ask("get", storage=0, keys=hashes(1))[0][0] is False
        assert engine.ask("exists", storage=0, keys=hashes(1)) == 0
        assert engine.ask("set", storage=0, keys=hashes(2), seed=1) == [False]
        assert engine.ask("kept", storage=0) == 0, "nor of one that cannot be reached"
        assert engine.ask("prefetch", first=0, pages=2) == {"found": 0, "read": 0, "digests": []}
        assert engine.ask("backup", first=100, pages=2, seed=2)["tokens"] == 0
        assert engine.ask("detach") is False


@pytest.mark.parametrize(
    ("settings", "reason"), [({"interface_v1": 0}, 'add "interface_v1": 1'), ({"masters": "kv:1"}, "unknown setting masters")]
)
def test_invalid_settings_keep_the_engine_from_attaching(
    cluster: LocalCluster, processes: Two, settings: dict[str, Any], reason: str
) -> None:
    use(processes[0], cluster.address, **settings)
    assert reason in processes[0].ask("open")


HEADS = 8
"""KV heads of the model whose ranks have shares of them."""


@pytest.mark.parametrize("share_tp", [4, 8])
@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct", "page_head"])
def test_host_pools_of_one_two_and_four_ranks_share_pages(cluster: LocalCluster, processes: Two, layout: str, share_tp: int) -> None:
    """One process has the ranks of the engine that writes, the other those of the ones that read."""
    one, two = processes
    salt, keys = f"share {layout} {share_tp}", hashes(1, 2, 3)

    def begin(engine: EngineChild, tp: int) -> dict[int, list[int]]:
        """The heads of each of the engine's back ends, by their numbers."""
        each = HEADS // tp
        use(engine, cluster.address, layout=layout, heads=each, salt=salt, share_tp=share_tp)
        return {engine.ask("open", tp=[rank, tp]): list(range(rank * each, (rank + 1) * each)) for rank in range(tp)}

    for seed, writer_tp in enumerate((1, 2, 4)):
        salt = f"share {layout} {share_tp} {writer_tp}"
        for storage, heads in begin(one, writer_tp).items():
            assert one.ask("set_heads", storage=storage, keys=keys[:2], seed=seed, heads=heads) == [True, True]
        whole = [
            [digest for storage in begin(two, writer_tp) for digest in two.ask("get_heads", storage=storage, keys=keys[:2])[page][1]]
            for page in range(2)
        ]
        assert len({digest for page in whole for digest in page}) == 2 * HEADS
        for reader_tp in (1, 2, 4):
            for storage, heads in begin(two, reader_tp).items():
                assert two.ask("exists", storage=storage, keys=keys) == 2
                read = two.ask("get_heads", storage=storage, keys=keys)
                assert [page[0] for page in read] == [True, True, False]
                assert [page[1] for page in read[:2]] == [[page[head] for head in heads] for page in whole]


def test_indivisible_heads_keep_the_engine_from_attaching(cluster: LocalCluster, processes: Two) -> None:
    use(processes[0], cluster.address, heads=HEADS, share_tp=3)
    assert r"share_tp is 3: a model with 8 KV heads on 1 tensor-parallel ranks takes 1, 2, 4, 8, 0 (off)" in processes[0].ask("open")


def test_sglang_s_own_name_for_a_common_tp_counts(cluster: LocalCluster, processes: Two) -> None:
    one, two = processes
    opened(one, cluster, layout="page_head", heads=HEADS, salt="lcm", share_tp=4)
    use(two, cluster.address, layout="page_head", heads=HEADS // 2, salt="lcm")
    assert (two.ask("open", tp=[1, 2], tp_lcm_size=4), two.ask("open", tp=[1, 2])) == (0, 1)
    assert one.ask("set_heads", storage=0, keys=hashes(1), seed=1, heads=list(range(HEADS))) == [True]
    assert (two.ask("exists", storage=0, keys=hashes(1)), two.ask("exists", storage=1, keys=hashes(1))) == (1, 0)


def test_pools_without_kv_heads_are_not_cut(cluster: LocalCluster, processes: Two) -> None:
    """MLA has one page for all ranks."""
    one, two = processes
    for each in processes:
        use(each, cluster.address, kind="mla", salt="mla", share_tp=4)
    assert (one.ask("open"), two.ask("open", tp=[1, 2])) == (0, 0)
    one.ask("set", storage=0, keys=hashes(1), seed=1)
    assert two.ask("get", storage=0, keys=hashes(1)) == one.ask("get", storage=0, keys=hashes(1))
    assert two.ask("exists", storage=0, keys=hashes(1)) == 1
