"""Translation of failed gRPC calls into typed errors: the inverse of protocol.errors.GRPC_STATUS."""

import re
from typing import Final
from urllib.parse import unquote

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
_UNREACHABLE: Final = re.compile(
    r"failed to connect to all addresses; last error: \w+: \w+:(\S+): (?:Failed to connect to remote host: )?(.+)"
)
_UNRESOLVED: Final = re.compile(r"(?:errors resolving|DNS resolution failed for) (\S+):\d+: .*", re.DOTALL)


def translated(error: grpc.RpcError) -> KVStoreError:
    """Return the typed error of a failed call."""
    if not isinstance(error, grpc.Call):
        return KVStoreError(str(error))
    details = error.details() or error.code().name
    return _ERRORS.get(error.code().name, KVStoreError)(_in_our_words(details))


def _in_our_words(details: str) -> str:
    if found := _UNREACHABLE.fullmatch(details):
        return f"cannot connect to {unquote(found[1])}: {found[2]}"
    if found := _UNRESOLVED.fullmatch(details):
        return f"cannot resolve {found[1]}, which a master has as `advertise`: make the name known to this host, or change the setting"
    return _OWN_WORDS.get(details, details)
