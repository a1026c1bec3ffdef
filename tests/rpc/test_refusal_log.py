"""A line a minute and reason."""

from kvstore.rpc.refusal_log import INTERVAL_NS, RefusalLog


def test_refusals_of_a_minute_are_one_line_with_their_number() -> None:
    log = RefusalLog()
    assert log.count("full", 5) == "refusing connections: full"
    assert [log.count("full", 5 + number) for number in range(233)] == [""] * 233
    assert log.count("full", 5 + INTERVAL_NS) == "refusing connections, 234 since 60 s ago: full"
    assert log.count("full", 6 + INTERVAL_NS) == ""
    assert log.total == 236


def test_each_reason_has_its_line() -> None:
    log = RefusalLog()
    assert [bool(log.count(reason, 5)) for reason in ("full", "no descriptor", "full")] == [True, True, False]
