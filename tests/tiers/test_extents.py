"""The allocator of extents against a set of free pages, and its choices one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.placements import MAX_LOOKED, ExtentAllocator, Run

PAGES = 300


def allocator(*free: tuple[int, int]) -> ExtentAllocator:
    """One of PAGES pages of which these runs are free."""
    made = ExtentAllocator()
    made.grow(PAGES)
    assert made.take(PAGES) == Run(0, PAGES)
    for begin, end in free:
        made.free(Run(begin, end))
    made.check_integrity()
    return made


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["take", "pieces", "free", "grow"]), st.integers(1, 40)), max_size=80))
def test_extents_in_any_order_match_a_set_of_pages(steps: list[tuple[str, int]]) -> None:
    made, free, taken = ExtentAllocator(), set[int](), list[list[Run]]()
    for act, number in steps:
        if act == "grow":
            free |= set(range(made.end_pages, made.end_pages + number))
            made.grow(made.end_pages + number)
        elif act == "free" and taken:
            for run in taken.pop(number % len(taken)):
                free |= set(range(*run))
                made.free(run)
        elif act == "take" and (found := made.take(number)) is not None:
            taken.append([found])
            free = without(free, taken[-1], number)
        elif act == "pieces" and number <= len(free):
            taken.append(made.take_pieces(number))
            free = without(free, taken[-1], number)
        made.check_integrity()
        assert {page for run in made.free_runs() for page in range(*run)} == free


def without(free: set[int], runs: list[Run], pages: int) -> set[int]:
    got = [page for run in runs for page in range(*run)]
    assert len(got) == pages == len(set(got))
    assert free.issuperset(got)
    return free.difference(got)


def test_take_prefers_the_run_of_its_own_length() -> None:
    made = allocator((0, 50), (60, 77), (100, 110), (200, 217))
    assert made.take(10) == Run(100, 110)
    assert {made.take(17), made.take(17)} == {Run(60, 77), Run(200, 217)}
    assert made.take(17) == Run(0, 17)


def test_take_looks_at_few_runs_of_its_own_bin() -> None:
    """Of runs of 16 and 17 pages, which share a bin, the first MAX_LOOKED are too short."""
    short = [(20 * number, 20 * number + 16) for number in range(MAX_LOOKED)]
    made = allocator(*short, (200, 217))
    assert made.take(17) is None
    assert made.take_pieces(17)[0].pages == 16
    assert allocator(*short[1:], (200, 217)).take(17) == Run(200, 217)


def test_take_without_a_run_that_long_takes_nothing() -> None:
    made = allocator((0, 5), (10, 15))
    assert made.take(6) is None
    assert made.free_pages == 10


def test_pieces_are_the_longest_runs_first() -> None:
    made = allocator((0, 5), (10, 30), (40, 52))
    assert made.take_pieces(35) == [Run(10, 30), Run(40, 52), Run(0, 3)]
    assert list(made.free_runs()) == [Run(3, 5)]


def test_freed_neighbours_are_joined() -> None:
    made = allocator((0, 10), (20, 30))
    made.free(Run(10, 20))
    assert list(made.free_runs()) == [Run(0, 30)]


def test_take_all_leaves_what_is_between_free() -> None:
    made = ExtentAllocator()
    made.take_all([Run(0, 3), Run(5, 6), Run(6, 9)])
    made.grow(9)
    assert list(made.free_runs()) == [Run(3, 5)]
    made.grow(12)
    assert sorted(made.free_runs()) == [Run(3, 5), Run(9, 12)]
    made.check_integrity()
