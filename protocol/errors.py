"""Every error kvstore raises, in one tree whose branches say who must act.

    KVStoreError
    ├── Retry          the world broke it: try again, later or elsewhere
    │   ├── Unavailable        the peer cannot be reached, or cannot serve this now
    │   │   ├── Unreachable        no connection to it could be had, or it broke
    │   │   │   └── TooManyConnections this process, or the peer, has no descriptor or place for another connection
    │   │   ├── Draining           the node takes no new blocks: it is to be stopped
    │   │   └── NoOwner            no master owns the catalog now, one is about to
    │   ├── DeadlineExceeded   the deadline passed first (also a TimeoutError)
    │   ├── Full               no room was freed before the deadline
    │   ├── QuotaExceeded      the tenant has all that its quota gives it: its owner frees something, or an operator gives it more
    │   └── CatalogUnavailable the catalog (etcd, disk) does not take writes now
    ├── Corrupt        bytes are not those that were put
    │   └── ChecksumMismatch
    ├── Fenced         what you hold is no longer valid: ask again
    │   ├── StaleEpoch         a command or registration older than one already seen
    │   ├── StaleHandle        a slot handle, hint or put id whose slot has been reused
    │   └── LeaseExpired       the lease ran out while its bytes were in use
    ├── Denied         you may not: wrong tenant or token
    │   ├── Unauthorized
    │   │   └── InvalidTicket      a node does not take the ticket: ask the master for another one
    │   └── Untrusted          TLS: one side does not accept the other's certificate, or does not speak TLS (also an OSError)
    ├── Broken         this part of the system is out of order: an operator must act
    │   └── TierFailed         a tier's device fails (ENOSPC, EIO, a damaged file)
    └── Misuse         the caller must change something
        ├── InvalidArgument    an argument is outside its documented range
        ├── ProtocolError      the peer's frame is malformed, too large or of another version
        ├── ConfigError        a setting is missing, malformed or cannot be met
        ├── TraceError         a trace file is malformed at a named line
        ├── Closed             the object was closed
        ├── Forked             the object is that of the process that this one was forked from
        └── Cancelled          the caller cancelled it

A miss is not an error. Foreign exceptions (OSError, grpc, lmdb) are translated once, where they enter.
"""

from typing import ClassVar


class KVStoreError(Exception):
    """Root of the tree. `code` is the error's number on the wire; a receiver that does not know it takes the branch's."""

    code: ClassVar[int] = 1


class Retry(KVStoreError):
    """The world broke it: the same call may succeed later or elsewhere."""

    code = 100


class Unavailable(Retry):
    """The peer cannot be reached, or says that it cannot serve this now."""

    code = 101


class Unreachable(Unavailable):
    """No connection to the peer could be had, or it broke before the answer."""

    code = 105


class TooManyConnections(Unreachable):
    """No further connection can be had: this process is out of descriptors, or the peer has all its connections in use."""

    code = 109


class Draining(Unavailable):
    """The node takes no new blocks, because it is to be stopped; what it has can be read."""

    code = 106


class NoOwner(Unavailable):
    """No master owns the catalog now. This one follows it, and it or another one is about to be elected."""

    code = 107


class DeadlineExceeded(Retry, TimeoutError):
    """The deadline passed before the operation was known to have succeeded; it may still take effect."""

    code = 102


class Full(Retry):
    """No room was freed before the deadline."""

    code = 103


class QuotaExceeded(Retry):
    """The tenant has all that its quota gives it, of what the text names: it frees something, or its operator gives it more."""

    code = 108


class CatalogUnavailable(Retry):
    """The catalog does not take writes now; nothing was made visible."""

    code = 104


class Corrupt(KVStoreError):
    """Bytes are not those that were put."""

    code = 200


class ChecksumMismatch(Corrupt):
    """A value's xxh3_64 is not the one recorded at its commit."""

    code = 201


class Fenced(KVStoreError):
    """What the caller holds is no longer valid."""

    code = 300


class StaleEpoch(Fenced):
    """A registration, command or write carries an epoch older than one already seen."""

    code = 301


class StaleHandle(Fenced):
    """A slot handle, location hint or put id whose slot has been given back since."""

    code = 302


class LeaseExpired(Fenced):
    """The lease ran out while its bytes were in use: what was read under it must be thrown away."""

    code = 303


class Denied(KVStoreError):
    """The caller may not do this."""

    code = 400


class Unauthorized(Denied):
    """The tenant is unknown or its token is wrong."""

    code = 401


class InvalidTicket(Unauthorized):
    """The ticket shown to a node has ended, or is under no key that it has; the master gives another one to whoever may have it."""

    code = 403


class Untrusted(Denied, OSError):
    """TLS came to nothing: one side does not accept the other's certificate, or one of them does not speak it. The text says what to do."""

    code = 402


class Broken(KVStoreError):
    """A part of the system is out of order until an operator acts."""

    code = 500


class TierFailed(Broken):
    """A tier's device refuses reads or writes; the node goes on with the tiers that work."""

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
    """A setting is missing, malformed or cannot be met on this machine."""

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
    """The caller cancelled the operation before it was over."""

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
"""The one table from errors to gRPC status names; an error takes the entry of its nearest ancestor."""


def typed(error: BaseException) -> KVStoreError:
    """As peers and callers are told of it: an exception that is not of the tree is somebody's mistake, whose traceback belongs in a log."""
    return error if isinstance(error, KVStoreError) else KVStoreError(f"internal error: {type(error).__name__}: {error}")


def from_code(code: int, message: str) -> KVStoreError:
    """The error that a peer sent as (code, message). An unknown code becomes its branch (the hundreds), else the root."""
    kind = BY_CODE.get(code) or BY_CODE.get(code // 100 * 100) or KVStoreError
    return kind(message)


def grpc_status(error: KVStoreError) -> str:
    """The gRPC status name for `error`, by the nearest ancestor in GRPC_STATUS."""
    return next(GRPC_STATUS[kind] for kind in type(error).__mro__ if kind in GRPC_STATUS)
