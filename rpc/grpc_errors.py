"""Translation of failed gRPC calls into typed errors: the inverse of protocol.errors.GRPC_STATUS."""

from typing import Final

import grpc

from kvstore.protocol.errors import GRPC_STATUS, InvalidArgument, KVStoreError

_ERRORS: Final[dict[str, type[KVStoreError]]] = {
    **{status: kind for kind, status in reversed(GRPC_STATUS.items())},
    "INVALID_ARGUMENT": InvalidArgument,
    "INTERNAL": KVStoreError,  # gRPC's own
}
"""Error by gRPC status name. Others become the root."""
_OWN_WORDS: Final = {"Deadline Exceeded": "no answer from the master's control plane within the deadline"}
"""Replacements for texts of the gRPC library."""


def translated(error: grpc.RpcError) -> KVStoreError:
    """Return the typed error of a failed call."""
    if not isinstance(error, grpc.Call):
        return KVStoreError(str(error))
    details = error.details() or error.code().name
    return _ERRORS.get(error.code().name, KVStoreError)(_OWN_WORDS.get(details, details))
