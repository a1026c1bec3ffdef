"""An outage is two lines of a log."""

import pytest

from kvstore.engines.vllm.trouble import Trouble
from kvstore.protocol.errors import Unavailable


def test_it_is_told_when_it_begins_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble("loading blocks", "they are computed")
    for error in (None, Unavailable("away"), Unavailable("away"), None, None, Unavailable("again")):
        trouble.saw(error)
    assert [record.getMessage() for record in caplog.records] == [
        "kvstore: loading blocks fails, they are computed: Unavailable: away",
        "kvstore: loading blocks works again, after 2 failures",
        "kvstore: loading blocks fails, they are computed: Unavailable: again",
    ]
