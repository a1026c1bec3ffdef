"""Promises of transfers.py beside those of all messages (test_messages.py)."""

from array import array

from kvstore.protocol.transfers import MAX_NOTICE_BYTES, MAX_PIECES, MAX_TRANSFER_BODY_BYTES, Notice, ReadRegions, WriteRegions


def test_a_request_to_write_looks_like_one_to_read() -> None:
    columns = [array("Q", [number, 2**64 - 1]) for number in range(4)]
    assert ReadRegions(*columns).pack() == WriteRegions(*columns).pack()


def test_body_limit_fits_largest_request_and_notification() -> None:
    most = array("Q", [2**64 - 1]) * MAX_PIECES
    assert len(ReadRegions(most, most, most, most).pack()) <= MAX_TRANSFER_BODY_BYTES
    assert len(Notice(bytes(MAX_NOTICE_BYTES)).pack()) <= MAX_TRANSFER_BODY_BYTES
