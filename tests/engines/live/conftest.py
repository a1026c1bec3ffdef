"""Time limit of tests with real engines."""

from pathlib import Path
from typing import Final

import pytest

LIMIT_S: Final = 1800
"""Several engines begin within one test, each of which takes minutes on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(LIMIT_S))
