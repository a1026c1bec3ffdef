"""Which prefixes can be restored, against the rule as SGLang writes it down."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.engines.sglang.hits import Hits, PoolPages, restorable_prefixes

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


def test_without_other_pools_it_is_the_kv_pages() -> None:
    assert restorable_prefixes(3, "kv", []) == Hits(3, {"kv": 3}, [1, 2, 3])
    assert restorable_prefixes(0, "kv", []) == Hits(0, {}, [])


def test_a_window_leaves_holes() -> None:
    """Five pages can be restored, and two; three and four cannot."""
    window = PoolPages("swa", [True, True, False, True, True], 2)
    assert restorable_prefixes(5, "kv", [window]) == Hits(5, {"kv": 5, "swa": 5}, [1, 2, 5])


def test_a_pool_that_needs_every_page_ends_the_prefix_at_its_first_gap() -> None:
    assert restorable_prefixes(4, "kv", [PoolPages("indexer", [True, True, False, True], None)]) == Hits(2, {"kv": 4, "indexer": 2}, [1, 2])


def test_a_pool_that_has_nothing_leaves_nothing() -> None:
    assert restorable_prefixes(4, "kv", [PoolPages("mamba", [False] * 4, 1)]) == Hits(0, {"kv": 4}, [])
