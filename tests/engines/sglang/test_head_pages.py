"""Values by KV heads of pages in each of SGLang's layouts, against slices by numpy.

`by_heads`: host pools that are split by KV heads, and their values.
"""

from dataclasses import replace

import numpy as np
import pytest

from kvstore.client.memory import view_of
from kvstore.engines.head_split import head_split
from kvstore.engines.sglang.head_pages import STAGING_BYTES, HeadPool, HostHeads, by_heads, host_heads
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError
from tests.engines.sglang.host_pool import LAYERS, LAYOUTS, PAGES, HostPool

HASHES = ["ab" * 32, "text"]


def head_pool(host: HostPool, count: int) -> HeadPool:
    whole = host.describe_pool((0, 1))
    runs = host.host_heads().runs
    assert runs is not None
    return HeadPool.of(whole, head_split(count, kv_heads=host.heads, tp=(0, 1)), runs)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pack_makes_values_that_a_pool_of_their_heads_would_have(layout: str, count: int) -> None:
    """Its pages are then the bytes of its regions, as those of an engine of as many ranks."""
    host = HostPool(layout, 8, seed=1)
    pool = head_pool(host, count)
    rows = pool.rows(PAGES)
    for row, page in zip(rows, pool.regions(*host.meta(*range(PAGES)), PAGES), strict=True):
        pool.pack(page, row)
    each = 8 // count
    for value in range(count):
        alone = HostPool(layout, each)
        alone.pages[:] = host.pages[..., value * each : (value + 1) * each, :]
        for number in range(PAGES):
            wanted = b"".join(view_of(pointer, size).tobytes() for pointer, size in zip(*alone.meta(number), strict=True))
            assert rows[number, value].tobytes() == wanted
    copy = HostPool(layout, 8)
    pool.unpack(rows[3], pool.regions(*copy.meta(1), 1)[0])
    assert np.array_equal(copy.pages[:, 1], host.pages[:, 3])
    assert not copy.pages[:, [0, 2, 3, 4]].any()


def test_places_with_heads_outermost_are_in_the_pool() -> None:
    host = HostPool("page_head", 8, seed=1)
    pool = head_pool(host, 4)
    assert pool.is_in_place
    rows = pool.rows(2)
    for row, page in zip(rows, pool.regions(*host.meta(4, 2), 2), strict=True):
        pool.pack(page, row)
    page_memory = pool.page_memory(*host.meta(4, 2), 2)
    assert [b"".join(part.view().tobytes() for part in value) for value in page_memory] == [
        value.tobytes() for page in rows for value in page
    ]
    assert not head_pool(HostPool("page_first", 8), 4).is_in_place


def test_regions_of_another_size_are_refused() -> None:
    pointers, sizes = HostPool("layer_first", 4).meta(0)
    pool = head_pool(HostPool("layer_first", 8), 2)
    assert len(sizes) == 2 * LAYERS
    for given in ((pointers, sizes), (pointers[1:], sizes)):
        with pytest.raises(ValueError, match="do not match 1 pages"):
            pool.regions(*given, 1)


def test_keys_follow_one_another_page_by_page() -> None:
    pool = head_pool(HostPool("page_first", 8), 2)
    first, second = pool.namespaces
    whole = HostPool("page_first", 8).describe_pool((0, 1))
    names = [key[len(whole.namespace.id) :] for key in whole.keys(HASHES)]
    assert pool.keys(HASHES) == [namespace.id + name for name in names for namespace in (first, second)]
    assert (first.heads, second.heads) == ((0, 2), (1, 2))
    assert (pool.values_per_page, pool.value_bytes, pool.is_writer) == (2, sum(whole.regions) // 2, True)
    assert pool.namespace not in (first, second)


def test_staging_holds_a_page_at_least_and_is_kept() -> None:
    pool = head_pool(HostPool("page_first", 8), 2)
    assert pool.batch_pages * pool.value_bytes * 2 <= STAGING_BYTES
    assert pool.rows(1).base is pool.rows(2).base


def test_values_under_other_weights_are_others() -> None:
    pool = head_pool(HostPool("page_first", 8), 2)
    other = pool.under("sampled-1@step-1", "")
    assert not {*pool.keys(HASHES)} & {*other.keys(HASHES)}
    assert other.namespace.revision == "sampled-1@step-1"
    assert pool.under("sampled-1", "") == pool


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
            pool = by_heads(host.describe_pool((rank, tp)), host.host_heads(), 4, total_heads=unknown)
            assert isinstance(pool, HeadPool)
            of_tp += pool.namespaces
        names.append(of_tp)
    assert len({each.id for each in names[0]}) == 4
    assert names[0] == names[1] == names[2]


def test_by_heads_of_replicas_has_one_writer() -> None:
    host = HostPool("page_head", 1)
    ranks = [by_heads(host.describe_pool((rank, 4)), host.host_heads(), 2, total_heads=lambda: 2) for rank in range(4)]
    assert [pool.is_writer for pool in ranks] == [True, False, True, False]
    first, second, third, fourth = (pool.keys(["ab" * 32]) for pool in ranks)
    assert first == second != third == fourth


def test_by_heads_refuses_what_cannot_be_cut() -> None:
    host = HostPool("page_first", 2)
    whole = host.describe_pool((0, 4))
    with pytest.raises(ConfigError, match=r"share_tp is 3: .* 8 KV heads on 4 .* takes 4, 8, 0 \(off\)"):
        by_heads(whole, host.host_heads(), 3, total_heads=unknown)
    with pytest.raises(ConfigError, match="cannot be separated in the pages of pool kv"):
        by_heads(whole, None, 4, total_heads=unknown)
    with pytest.raises(ConfigError, match=r"\(page_unified\)"):
        by_heads(replace(whole, layout="page_unified"), replace(host.host_heads(), layout="page_unified"), 4, total_heads=unknown)


def test_by_heads_without_model_heads_gives_ranks_their_own() -> None:
    host = HostPool("page_head", 1)
    with pytest.raises(ConfigError):
        by_heads(host.describe_pool((0, 4)), host.host_heads(), 2, total_heads=None)
    pool = by_heads(host.describe_pool((3, 4)), host.host_heads(), 4, total_heads=None)
    assert isinstance(pool, HeadPool)
    assert pool.split.first == 3
