"""Errors become the codes that programs written for Mooncake know."""

import pytest

from kvstore.engines.mooncake.codes import code_of, read, stored
from kvstore.protocol.errors import (
    ChecksumMismatch,
    Closed,
    DeadlineExceeded,
    Full,
    InvalidArgument,
    KVStoreError,
    LeaseExpired,
    TierFailed,
    Unreachable,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Full("x"), -200),
        (DeadlineExceeded("x"), -901),
        (Unreachable("x"), -900),
        (InvalidArgument("x"), -600),
        (Closed("x"), -600),
        (ChecksumMismatch("x"), -801),
        (LeaseExpired("x"), -707),
        (TierFailed("x"), -500),
        (KVStoreError("x"), -1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_code_of_an_error(error: KVStoreError, code: int) -> None:
    assert (code_of(error), stored(error), read(error)) == (code,) * 3


def test_what_is_there_already_is_a_success_and_a_miss_is_a_code() -> None:
    assert (stored(True), stored(False)) == (0, 0)
    assert (read(17), read(None)) == (17, -704)
