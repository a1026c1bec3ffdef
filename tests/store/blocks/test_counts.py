"""Promises of counts.py."""

from kvstore.store.blocks.counts import FIRST_INTERVAL_NS, MAX_SAMPLES, MAX_TENANTS, OTHERS, AccessClock, TierCounts


def test_hits_are_counted_by_tenant_of_whom_the_least_read_go_together() -> None:
    counts = TierCounts()
    for number in range(1, MAX_TENANTS + 1):
        counts.hit(f"t{number}", number)
    counts.tidy()
    assert len(counts.tenant_hits) == MAX_TENANTS
    counts.hit("one more")
    counts.tidy()
    assert len(counts.tenant_hits) == MAX_TENANTS // 2 + 1
    assert {f"t{MAX_TENANTS}", OTHERS} <= counts.tenant_hits.keys()
    for number in range(MAX_TENANTS):
        counts.hit(f"u{number}")
    counts.tidy()
    assert len(counts.tenant_hits) <= MAX_TENANTS
    assert counts.hits == sum(counts.tenant_hits.values())


def test_an_eviction_is_counted_with_the_last_access() -> None:
    counts = TierCounts()
    counts.evict(7)
    assert (counts.evictions, counts.evicted) == (1, [7])


def test_an_access_is_as_old_as_the_sample_before_it() -> None:
    clock = AccessClock()
    assert clock.age_ns(5, 100) == 0, "nothing is known yet"
    for second in range(10):
        clock.sample(100 * second, second * FIRST_INTERVAL_NS)
    clock.sample(10_000, 9 * FIRST_INTERVAL_NS + 1)  # too early for another sample
    now_ns = 10 * FIRST_INTERVAL_NS
    assert clock.age_ns(0, now_ns) == 10 * FIRST_INTERVAL_NS
    assert clock.age_ns(450, now_ns) == 6 * FIRST_INTERVAL_NS
    assert clock.age_ns(5000, now_ns) == FIRST_INTERVAL_NS


def test_it_remembers_longer_and_longer_in_bounded_memory() -> None:
    clock = AccessClock()
    end = 10 * MAX_SAMPLES
    for second in range(end):
        clock.sample(second, second * FIRST_INTERVAL_NS)
        assert len(clock._accesses) < MAX_SAMPLES
    for access in (0, end // 3, end - 1):
        error_ns = clock.age_ns(access, end * FIRST_INTERVAL_NS) - (end - access) * FIRST_INTERVAL_NS
        assert 0 <= error_ns <= 32 * FIRST_INTERVAL_NS


def test_many_evictions_are_counted_as_one_by_one() -> None:
    counts = TierCounts()
    counts.evict(7)
    counts.evict_all([9, 8])
    counts.evict_all([])
    assert (counts.evictions, counts.evicted) == (3, [7, 9, 8])
