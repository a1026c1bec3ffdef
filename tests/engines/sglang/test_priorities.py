"""Priorities of SGLang's requests as hints of their pages."""

import sys

import pytest

from kvstore.engines.sglang.priorities import PagePriorities
from kvstore.protocol.retention import Retention

PAGES = [f"{number:064x}" for number in range(6)]


@pytest.mark.parametrize(
    ("priority", "ceiling", "hint"),
    [
        (10, 75, Retention(60)),
        (-10, 75, Retention(40)),
        (100, 75, Retention(75)),
        (-100, 75, Retention(0)),
        (10, 50, None),
        (10, 20, Retention(20)),
        *((unset, 75, None) for unset in (0, 1, sys.maxsize, -sys.maxsize, -sys.maxsize - 1)),
    ],
)
def test_priority_counts_from_the_default_one(priority: int, ceiling: int, hint: Retention | None) -> None:
    priorities = PagePriorities()
    priorities.note(PAGES[:2], priority)
    assert priorities.hint(PAGES[:2], ceiling) == hint


def test_batches_of_a_node_have_its_priority() -> None:
    priorities = PagePriorities()
    priorities.note(PAGES[:4], 10)
    assert priorities.hint(PAGES[2:4], 75) == Retention(60)
    assert priorities.hint(PAGES[2:4], 75) == Retention(60), "those of another pool"
    assert priorities.hint(PAGES[4:], 75) is None
    assert priorities.hint([], 75) is None


def test_last_priority_of_a_page_counts() -> None:
    priorities = PagePriorities()
    priorities.note(PAGES[:1], 10)
    priorities.note(PAGES[:1], 20)
    assert priorities.hint(PAGES, 75) == Retention(70)
    priorities.note(PAGES[:1], 0)
    assert priorities.hint(PAGES, 75) is None


def test_oldest_pages_are_forgotten() -> None:
    priorities = PagePriorities(limit=3)
    for page in PAGES:
        priorities.note([page], 10)
    assert [priorities.hint([page], 75) is not None for page in PAGES] == [False] * 3 + [True] * 3
