"""Promises of rails.py."""

from kvstore.scheduler.simulator.rails import Rails


def test_what_is_sent_waits_for_what_was_asked_before() -> None:
    rails = Rails(100.0)
    assert rails.send(200, now_s=1.0) == 3.0
    assert rails.backlog_bytes(2.0) == 100
    assert rails.send(50, now_s=2.0) == 3.5
    assert rails.backlog_bytes(2.0) == 150
    assert rails.backlog_bytes(4.0) == 0
    assert rails.send(100, now_s=10.0) == 11.0
    assert rails.sent_bytes == 350
