"""Names and places of SGLang's pages.

Restorable prefixes, against SGLang's own rule.
"""

import ctypes
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.memory import Memory
from kvstore.engines.sglang.pages import Hits, PlainHostPool, PoolPages, Rank, restorable_prefixes

POOL = PlainHostPool(
    name="kv",
    kind="MHATokenToKVPoolHost",
    model="llama",
    weights="sampled-1",
    salt="",
    dtype="float16",
    layout="page_first",
    page_tokens=16,
    regions=(4096, 4096),
    rank=Rank(tp=(0, 2)),
    layers="0:4",
    is_replicated=False,
)
HASH = "ab" * 32


def key(page_hash: str = HASH, **changed: Any) -> bytes:
    return replace(POOL, **changed).keys([page_hash])[0]


def test_equal_pools_of_two_engines_have_equal_keys() -> None:
    assert key() == replace(POOL).keys([HASH])[0]
    assert key().startswith(POOL.namespace.id)
    assert key().endswith(bytes.fromhex(HASH))


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "swa"},
        {"model": "llama-2"},
        {"kind": "UnifiedPageEnvelopeHostPool"},
        {"weights": "sampled-2"},
        {"adapters": "a1"},
        {"config": "c1"},
        {"layers": "4:8"},
        {"salt": "secret"},
        {"dtype": "bfloat16"},
        {"layout": "layer_first"},
        {"page_tokens": 32},
        {"regions": (4096, 4096, 4096, 4096)},
        {"regions": (8192,)},
        {"rank": Rank(tp=(1, 2))},
        {"rank": Rank(tp=(0, 4))},
        {"rank": Rank(tp=(0, 1))},
        {"rank": Rank(tp=(0, 2), pp=(0, 2))},
        {"rank": Rank(tp=(0, 2), pp=(1, 2))},
        {"rank": Rank(tp=(0, 2), cp=(1, 2))},
        {"rank": Rank(tp=(0, 2), dcp=(1, 2))},
        {"is_replicated": True},
        {"draft": "llama-eagle"},
        {"told": '{"quantization": "fp8"}'},
    ],
)
def test_pools_that_differ_in_what_changes_bytes_share_nothing(changed: dict[str, Any]) -> None:
    assert key(**changed) != key()


def test_pool_under_other_weights() -> None:
    """A pool without pages of a draft model does not change with that."""
    assert POOL.under("sampled-1", "draft-2") == POOL
    assert POOL.under("sampled-1@step-1", "").namespace.revision == "sampled-1@step-1"
    assert replace(POOL, draft="draft").under("sampled-1", "draft-2").namespace.extra["draft"] == "draft-2"


def test_ranks_that_hold_the_same_share_their_pages_at_any_size() -> None:
    keys = {key(rank=Rank(tp=tp), is_replicated=True) for tp in ((0, 1), (0, 2), (1, 2), (3, 8))}
    assert len(keys) == 1


def test_any_name_of_a_page_makes_a_key_that_the_store_takes() -> None:
    names = [HASH, HASH.upper(), HASH[:-2], "x" * 200, "x" * 201, "x" * 202, "é" * 100, ""]
    keys = POOL.keys(names)
    assert len(set(keys)) == len(names)
    assert max(map(len, keys)) <= 255


def test_the_regions_of_each_page_are_in_order() -> None:
    buffer = ctypes.create_string_buffer(4 * 4096)
    at = ctypes.addressof(buffer)
    pointers = [at + 8192, at + 12288, at, at + 4096]
    first, second = POOL.page_memory(pointers, [4096] * 4, 2)
    assert first == [Memory(at + 8192, 4096), Memory(at + 12288, 4096)]
    assert second == [Memory(at, 4096), Memory(at + 4096, 4096)]
    assert POOL.page_memory([], [], 0) == []
    assert (POOL.page_bytes, POOL.value_bytes, POOL.values_per_page) == (8192, 8192, 1)
    assert POOL.is_in_place
    assert POOL.is_writer


@pytest.mark.parametrize(("pointers", "sizes", "pages"), [([1, 2], [4096, 4096], 2), ([1, 2], [4096, 2048], 1), ([1], [4096, 4096], 1)])
def test_regions_that_are_not_those_of_the_pages_are_refused(pointers: list[int], sizes: list[int], pages: int) -> None:
    with pytest.raises(ValueError, match="regions do not match"):
        POOL.page_memory(pointers, sizes, pages)


PAGES = 8


def naive(kv_pages: int, pools: list[PoolPages]) -> list[int]:
    """Every prefix, and every page that each pool needs of it."""

    def has(pool: PoolPages, length: int) -> bool:
        window = length if pool.window_pages is None else max(1, pool.window_pages)
        return all(pool.found[page] for page in range(max(0, length - window), length))

    return [length for length in range(1, kv_pages + 1) if all(has(pool, length) for pool in pools)]


found = st.lists(st.booleans(), min_size=PAGES, max_size=PAGES)
pools = st.lists(st.builds(PoolPages, st.sampled_from("abc"), found, st.none() | st.integers(0, PAGES + 1)), max_size=3)


@given(st.integers(0, PAGES), pools)
def test_the_prefixes_are_those_of_the_rule(kv_pages: int, others: list[PoolPages]) -> None:
    hits = restorable_prefixes(kv_pages, "kv", others)
    assert hits.restorable == naive(kv_pages, others)
    assert hits.pages == max(hits.restorable, default=0)
    for pool in others:
        if pool.name in hits.by_pool and [each.name for each in others].count(pool.name) == 1:
            assert hits.by_pool[pool.name] == max(naive(kv_pages, [pool]))


def test_hits_are_named_by_pool() -> None:
    """Of a window five pages can be restored, and two; three and four cannot. A pool that needs every page ends at its first gap."""
    assert restorable_prefixes(3, "kv", []) == Hits(3, {"kv": 3}, [1, 2, 3])
    assert restorable_prefixes(0, "kv", []) == Hits(0, {}, [])
    window = PoolPages("swa", [True, True, False, True, True], 2)
    assert restorable_prefixes(5, "kv", [window]) == Hits(5, {"kv": 5, "swa": 5}, [1, 2, 5])
    assert restorable_prefixes(4, "kv", [PoolPages("indexer", [True, True, False, True], None)]) == Hits(2, {"kv": 4, "indexer": 2}, [1, 2])
    assert restorable_prefixes(4, "kv", [PoolPages("mamba", [False] * 4, 1)]) == Hits(0, {"kv": 4}, [])
