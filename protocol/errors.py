"""Error hierarchy of kvstore, branched by who must act.

    KVStoreError
    ├── Retry          temporary: try again, later or elsewhere.
    │   ├── Unavailable        the peer is unreachable or cannot serve this now.
    │   │   ├── Unreachable        connecting failed, or the connection broke.
    │   │   │   └── TooManyConnections this process or the peer is out of descriptors or connections.
    │   │   ├── Draining           the node takes no new blocks, because it will be stopped.
    │   │   └── NoOwner            no master owns the catalog; an election is under way.
    │   ├── DeadlineExceeded   the deadline passed (also a TimeoutError).
    │   ├── Full               no space was freed before the deadline.
    │   ├── QuotaExceeded      the tenant's quota is used up: free something, or have an operator raise it.
    │   └── CatalogUnavailable the catalog (etcd, disk) does not accept writes now.
    ├── Corrupt        bytes differ from those that were put.
    │   └── ChecksumMismatch
    ├── Fenced         a handle, lease or epoch is no longer valid: request a new one.
    │   ├── StaleEpoch         a command or registration older than one already seen.
    │   ├── StaleHandle        a slot handle, location or put id whose slot was reused.
    │   └── LeaseExpired       the lease expired while its bytes were in use.
    ├── Denied         not permitted: wrong tenant or token.
    │   ├── Unauthorized
    │   │   └── InvalidTicket      a node rejects the ticket: request another from the master.
    │   └── Untrusted          TLS: a certificate is not accepted, or one side does not use TLS (also an OSError).
    ├── Broken         a part of the system is broken: an operator must act.
    │   └── TierFailed         a tier's device fails (ENOSPC, EIO, a damaged file).
    └── Misuse         the caller must change something.
        ├── InvalidArgument    an argument is outside its documented range.
        ├── ProtocolError      the peer's frame is malformed, too large or of another version.
        ├── ConfigError        a setting is missing, malformed or cannot be satisfied.
        ├── TraceError         a trace file is malformed at the line given.
        ├── Closed             the object was closed.
        ├── Forked             the object belongs to the parent process of a fork.
        └── Cancelled          the caller cancelled the operation.

A miss is not an error. Foreign exceptions (OSError, grpc, lmdb) are translated once, at the boundary.
"""

from typing import ClassVar


class KVStoreError(Exception):
    """Root of the tree.

    `code` is the error's number on the wire; a receiver that does not know it takes the branch's.
    """

    code: ClassVar[int] = 1


class Retry(KVStoreError):
    """A temporary failure: the same call may succeed later or elsewhere."""

    code = 100


class Unavailable(Retry):
    """The peer is unreachable, or cannot serve this now."""

    code = 101


class Unreachable(Unavailable):
    """Connecting to the peer failed, or the connection broke before the response."""

    code = 105


class TooManyConnections(Unreachable):
    """This process is out of descriptors, or the peer has all its connections in use."""

    code = 109


class Draining(Unavailable):
    """The node takes no new blocks, because it will be stopped; its blocks can be read."""

    code = 106


class NoOwner(Unavailable):
    """No master owns the catalog now; an election is under way."""

    code = 107


class DeadlineExceeded(Retry, TimeoutError):
    """The deadline passed before the operation was known to have succeeded; it may still take effect."""

    code = 102


class Full(Retry):
    """No space was freed before the deadline."""

    code = 103


class QuotaExceeded(Retry):
    """The tenant's quota of the limit in the text is used up: free something, or have an operator raise it."""

    code = 108


class CatalogUnavailable(Retry):
    """The catalog does not accept writes now; nothing was made visible."""

    code = 104


class Corrupt(KVStoreError):
    """Bytes differ from those that were put."""

    code = 200


class ChecksumMismatch(Corrupt):
    """A value's xxh3_64 is not the one recorded at its commit."""

    code = 201


class Fenced(KVStoreError):
    """The caller's handle, lease or epoch is no longer valid."""

    code = 300


class StaleEpoch(Fenced):
    """A registration, command or write carries an epoch older than one already seen."""

    code = 301


class StaleHandle(Fenced):
    """A slot handle, cached location or put id whose slot has been freed since."""

    code = 302


class LeaseExpired(Fenced):
    """The lease expired while its bytes were in use; discard what was read under it."""

    code = 303


class Denied(KVStoreError):
    """The caller may not do this."""

    code = 400


class Unauthorized(Denied):
    """The tenant is unknown or its token is wrong."""

    code = 401


class InvalidTicket(Unauthorized):
    """The ticket has expired, or the node does not have its key; request another from the master."""

    code = 403


class Untrusted(Denied, OSError):
    """TLS failed: a certificate was not accepted, or one side does not use TLS. The text has the remedy."""

    code = 402


class Broken(KVStoreError):
    """A part of the system is broken until an operator acts."""

    code = 500


class TierFailed(Broken):
    """A tier's device refuses reads or writes; the node continues with its other tiers."""

    code = 501


class Misuse(KVStoreError):
    """The caller must change something; a retry cannot help."""

    code = 600


class InvalidArgument(Misuse):
    """An argument is outside its documented range."""

    code = 601


class ProtocolError(Misuse):
    """The peer's frame is malformed, over a limit, or of another protocol version."""

    code = 602


class ConfigError(Misuse):
    """A setting is missing, malformed or cannot be satisfied on this machine."""

    code = 603


class TraceError(Misuse):
    """A trace file is malformed; the message names the line."""

    code = 604


class Closed(Misuse):
    """The object was closed before the call."""

    code = 605


class Forked(Misuse):
    """The object belongs to the process that this one was forked from; make one here."""

    code = 607


class Cancelled(Misuse):
    """The caller cancelled the operation before it ended."""

    code = 606


def _tree(root: type[KVStoreError]) -> list[type[KVStoreError]]:
    return [root] + [below for child in root.__subclasses__() for below in _tree(child)]


BY_CODE: dict[int, type[KVStoreError]] = {error.code: error for error in _tree(KVStoreError)}

GRPC_STATUS: dict[type[KVStoreError], str] = {
    Unavailable: "UNAVAILABLE",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    Full: "RESOURCE_EXHAUSTED",
    QuotaExceeded: "RESOURCE_EXHAUSTED",
    CatalogUnavailable: "UNAVAILABLE",
    Retry: "UNAVAILABLE",
    Corrupt: "DATA_LOSS",
    Fenced: "FAILED_PRECONDITION",
    Unauthorized: "UNAUTHENTICATED",
    Denied: "PERMISSION_DENIED",
    Broken: "INTERNAL",
    Misuse: "INVALID_ARGUMENT",
    KVStoreError: "UNKNOWN",
}
"""gRPC status names; an error without an entry takes that of its nearest ancestor."""


def typed(error: BaseException) -> KVStoreError:
    """Return the error to send to peers: `error` itself, or an internal error for a foreign exception, which the caller
    should log.
    """
    return error if isinstance(error, KVStoreError) else KVStoreError(f"internal error: {type(error).__name__}: {error}")


def from_code(code: int, message: str) -> KVStoreError:
    """Return the error that a peer sent as (code, message).

    An unknown code becomes its branch (the hundreds), else the root.
    """
    kind = BY_CODE.get(code) or BY_CODE.get(code // 100 * 100) or KVStoreError
    return kind(message)


def grpc_status(error: KVStoreError) -> str:
    """Return the gRPC status name for `error`."""
    return next(GRPC_STATUS[kind] for kind in type(error).__mro__ if kind in GRPC_STATUS)
