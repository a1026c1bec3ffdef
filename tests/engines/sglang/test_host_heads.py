"""Which host pools are cut by KV heads, and into which values."""

from dataclasses import replace

import pytest

from kvstore.engines.sglang.head_pages import HeadPool
from kvstore.engines.sglang.host_heads import HostHeads, by_heads, host_heads, pool_split
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError
from tests.engines.sglang.host_pool import LAYOUTS, HostPool


class MHATokenToKVPoolHost:
    """As SGLang's class of this name says what it holds."""

    layout, head_num, layer_num = "page_head", 2, 3


class Asymmetric(MHATokenToKVPoolHost):
    pass


class MambaPoolHost:
    layout, head_num, layer_num = "page_first", 2, 3


def unknown() -> int:
    raise AssertionError("asked for the heads of a model that are plain")


def test_host_heads_of_a_pool_of_kv_heads() -> None:
    assert host_heads(Asymmetric(), 16) == HostHeads(layout="page_head", heads=2, layers=3, page_tokens=16)
    assert host_heads(MambaPoolHost(), 16) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_by_heads_gives_equal_namespaces_for_any_tp(layout: str) -> None:
    names = []
    for tp in (1, 2, 4):
        of_tp: list[Namespace] = []
        for rank in range(tp):
            host = HostPool(layout, 8 // tp)
            pool = by_heads(host.described((rank, tp)), host.host_heads(), 4, total_heads=unknown)
            assert isinstance(pool, HeadPool)
            of_tp += pool.namespaces
        names.append(of_tp)
    assert len({each.id for each in names[0]}) == 4
    assert names[0] == names[1] == names[2]


def test_by_heads_of_replicas_has_one_writer() -> None:
    host = HostPool("page_head", 1)
    ranks = [by_heads(host.described((rank, 4)), host.host_heads(), 2, total_heads=lambda: 2) for rank in range(4)]
    assert [pool.is_writer for pool in ranks] == [True, False, True, False]
    first, second, third, fourth = (pool.keys(["ab" * 32]) for pool in ranks)
    assert first == second != third == fourth


def test_by_heads_refuses_what_cannot_be_cut() -> None:
    host = HostPool("page_first", 2)
    whole = host.described((0, 4))
    with pytest.raises(ConfigError, match=r"share_tp is 3: .* 8 KV heads on 4 .* takes 4, 8, 0 \(off\)"):
        by_heads(whole, host.host_heads(), 3, total_heads=unknown)
    with pytest.raises(ConfigError, match="cannot be told apart in the pages of pool kv"):
        by_heads(whole, None, 4, total_heads=unknown)
    with pytest.raises(ConfigError, match=r"\(page_unified\)"):
        by_heads(replace(whole, layout="page_unified"), replace(host.host_heads(), layout="page_unified"), 4, total_heads=unknown)


def test_pool_split_without_the_model_s_heads_takes_each_rank_for_one_with_its_own() -> None:
    with pytest.raises(ConfigError):
        pool_split(2, heads=1, tp=(0, 4), total_heads=None)
    assert pool_split(4, heads=1, tp=(3, 4), total_heads=None).first == 3
