"""Promises of notices.py; that peers are told of them: tests/transfer/streams, tests/transfer/shm."""

import pytest

from kvstore.protocol.errors import Full, InvalidArgument
from kvstore.protocol.transfers import MAX_NOTICE_BYTES
from kvstore.transfer.agent import MAX_NOTICES, MAX_NOTICES_BYTES, Notices


def test_they_are_told_once_in_order_with_their_sender() -> None:
    notices = Notices("here")
    for message in (b"one", b"", b"x" * MAX_NOTICE_BYTES):
        notices.put("there", message)
    assert notices.take() == [("there", b"one"), ("there", b""), ("there", b"x" * MAX_NOTICE_BYTES)]
    assert notices.take() == []


def test_one_that_is_too_long_is_refused() -> None:
    notices = Notices("here")
    with pytest.raises(InvalidArgument, match=f"at most {MAX_NOTICE_BYTES} bytes"):
        notices.put("there", bytes(MAX_NOTICE_BYTES + 1))
    assert notices.take() == []


@pytest.mark.parametrize(("size_bytes", "most"), [(0, MAX_NOTICES), (MAX_NOTICE_BYTES - 1, MAX_NOTICES_BYTES // MAX_NOTICE_BYTES)])
def test_what_nobody_takes_is_bounded_in_number_and_in_bytes(size_bytes: int, most: int) -> None:
    notices, message = Notices("here"), bytes(size_bytes)
    for _ in range(most):
        notices.put("t", message)
    with pytest.raises(Full, match=f"here has {most} notifications that nobody took"):
        notices.put("t", message)
    assert len(notices.take()) == most
    notices.put("t", message)
    assert len(notices.take()) == 1
