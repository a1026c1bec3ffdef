"""Mooncake's result codes, and the code of each error of the store. Mooncake's calls do not raise these errors."""

from typing import Final

from kvstore.protocol.errors import (
    Closed,
    Corrupt,
    DeadlineExceeded,
    Fenced,
    Full,
    InvalidArgument,
    KVStoreError,
    QuotaExceeded,
    TierFailed,
    Unavailable,
)

OK: Final = 0
INTERNAL_ERROR: Final = -1
NO_AVAILABLE_HANDLE: Final = -200
"""No free space: engines slow down and retry."""
WRITE_FAIL: Final = -500
INVALID_PARAMS: Final = -600
INVALID_REPLICA: Final = -702
OBJECT_NOT_FOUND: Final = -704
OBJECT_ALREADY_EXISTS: Final = -705
OBJECT_HAS_LEASE: Final = -706
LEASE_EXPIRED: Final = -707
CHECKSUM_MISMATCH: Final = -801
FILE_NOT_FOUND: Final = -1100
RPC_FAIL: Final = -900
RPC_TIMEOUT: Final = -901

_CODES: Final[tuple[tuple[type[KVStoreError], int], ...]] = (
    (Full, NO_AVAILABLE_HANDLE),
    (QuotaExceeded, NO_AVAILABLE_HANDLE),
    (DeadlineExceeded, RPC_TIMEOUT),
    (Unavailable, RPC_FAIL),
    (InvalidArgument, INVALID_PARAMS),
    (Closed, INVALID_PARAMS),
    (Corrupt, CHECKSUM_MISMATCH),
    (Fenced, LEASE_EXPIRED),
    (TierFailed, WRITE_FAIL),
)


def code_of(error: KVStoreError) -> int:
    """Return Mooncake's code of an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), INTERNAL_ERROR)


def stored(result: bool | KVStoreError) -> int:
    """Return the code of one key's put: an existing object is a success."""
    return code_of(result) if isinstance(result, KVStoreError) else OK


def read(result: int | KVStoreError | None) -> int:
    """Return the number of bytes of one key's get, or a code."""
    if result is None:
        return OBJECT_NOT_FOUND
    return code_of(result) if isinstance(result, KVStoreError) else result
