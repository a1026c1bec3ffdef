"""Set-up that tests of several commands share."""

import signal
from collections.abc import Iterator

import pytest

from tests.client.embedded import embedded


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """The address of an embedded cluster's master."""
    with embedded() as cluster:
        yield cluster.address


@pytest.fixture(autouse=True)
def hangup_ends() -> Iterator[None]:
    """Restore the default action of SIGHUP, which tests started under nohup inherit as ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, signal.SIG_DFL if before is None else before)
