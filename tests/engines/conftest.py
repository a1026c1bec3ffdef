"""An engine's KV events, for tests of several folders."""

from collections.abc import Iterator

import pytest

from tests.engines.kv_events.publisher import Publisher


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher() as found:
        yield found
