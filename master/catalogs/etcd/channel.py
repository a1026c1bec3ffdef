"""gRPC channel to one of several etcd endpoints, with TLS and a login. A failed call switches to the next endpoint.

aetcd's Client supports one endpoint and no TLS, so only its generated messages are used. The channel has one
endpoint rather than a gRPC address list: certificates are checked against the requested name, and names and
addresses may be mixed."""

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from kvstore.protocol.errors import CatalogUnavailable, ConfigError, KVStoreError

OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the way out of the data centre; etcd is never behind it.
    ("grpc.use_local_subchannel_pool", 1),  # A new channel must not inherit the reconnect back-off of the one it replaces.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),  # The largest response: a page of a listing.
    ("grpc.keepalive_time_ms", 10_000),  # etcd drops a client that pings more often than every 5 s.
    ("grpc.keepalive_timeout_ms", 5_000),
)
NOT_MENDED_BY_RETRY = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,  # among them: wrong user name or password
        grpc.StatusCode.FAILED_PRECONDITION,  # a user is named but authentication is off
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,  # this is not an etcd
    }
)
MAX_DETAILS = 160
"""Characters of gRPC's details in an error."""
_ERRNO = re.compile(r"([^:; ][^:;]*) \(\d+\)$")
_PREFIX = re.compile(r"^(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?")
UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """TLS files and login. `ca` (PEM) turns TLS on; `cert` and `key` (PEM, both or none) are the client certificate;
    `user` logs in."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("etcd: a client certificate needs both cert and key")
        if self.cert is not None and self.ca is None:
            raise ConfigError("etcd: a client certificate needs ca, the authority of the servers, too")
        if (self.user is None) != (self.password is None):
            raise ConfigError("etcd: a login needs both a user and a password")


@dataclass(frozen=True, slots=True)
class _EtcdConnection:
    endpoint: str
    channel: grpc.Channel
    calls: dict[str, Any]
    metadata: tuple[tuple[str, str], ...]


class Reply:
    """Pending response of one call. `result` may be called once, from any thread."""

    def __init__(self, owner: "EtcdChannel", connection: _EtcdConnection, future: Any) -> None:
        self._owner = owner
        self._connection = connection
        self._future = future

    def result(self) -> Any:
        """Wait for the response, at most until the call's deadline.

        Raises CatalogUnavailable or ConfigError. The connection has been dropped then, and the call may or may not
        have taken effect."""
        try:
            return self._future.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            self._owner._drop(self._connection)
            raise _translated(error, self._connection.endpoint) from error


class ReplyStream:
    """Responses of a streaming call. One thread iterates; any thread may `cancel`, which ends the iteration with an
    error."""

    def __init__(self, owner: "EtcdChannel", connection: _EtcdConnection, call: Any) -> None:
        self._owner = owner
        self._connection = connection
        self._call = call

    def __iter__(self) -> Iterator[Any]:
        """Raises CatalogUnavailable or ConfigError; the connection has been dropped then."""
        try:
            yield from self._call
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            self._owner._drop(self._connection)
            raise _translated(error, self._connection.endpoint) from error

    def cancel(self) -> None:
        self._call.cancel()


class EtcdChannel:
    """Calls to etcd over one shared connection. Thread-safe; a failed call drops the connection for all threads."""

    def __init__(self, endpoints: Sequence[str], access: EtcdAccess) -> None:
        """`endpoints` are `host:port`, at least one, tried in order. The files of `access` are read now, and again with
        each connection.

        Raises ConfigError when a file cannot be read."""
        self._endpoints = tuple(endpoints)
        self._access = access
        self._credentials = _credentials(access)  # an error shows now, rather than with the first connection
        self._lock = threading.Lock()
        self._connection: _EtcdConnection | None = None
        self._next_endpoint = 0
        self._closed = False

    def start(self, method: str, request: Any, *, timeout_s: float) -> Reply:
        """Send a request of a unary method, after connecting and logging in if needed.

        Raises as Reply.result does."""
        with self._lock:
            connection = self._connection or self._connect(timeout_s)
            future = connection.calls[method].future(request, timeout=timeout_s, metadata=connection.metadata)
        return Reply(self, connection, future)

    def call(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """Send a unary request and wait for its response."""
        return self.start(method, request, timeout_s=timeout_s).result()

    def stream(self, method: str, requests: Iterator[Any], *, connect_timeout_s: float, timeout_s: float | None = None) -> ReplyStream:
        """Begin a streaming call (`Watch`, `LeaseKeepAlive`); a thread of gRPC's iterates `requests`.

        A server that has lost its leader ends the call. Raises as Reply.result does."""
        with self._lock:
            connection = self._connection or self._connect(connect_timeout_s)
            metadata = (*connection.metadata, ("hasleader", "true"))
            call = connection.calls[method](requests, timeout=timeout_s, metadata=metadata)
        return ReplyStream(self, connection, call)

    def close(self) -> None:
        """Cancel calls under way and fail later ones with CatalogUnavailable. Idempotent.

        Waits for a login under way, at most until that call's deadline."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.channel.close()

    def _connect(self, timeout_s: float) -> _EtcdConnection:
        if self._closed:
            raise CatalogUnavailable("etcd: the connection was closed")
        endpoint = self._endpoints[self._next_endpoint]
        self._next_endpoint = (self._next_endpoint + 1) % len(self._endpoints)
        with contextlib.suppress(ConfigError):  # the files are being replaced: keep the former
            self._credentials = _credentials(self._access)
        if self._credentials is None:
            channel = grpc.insecure_channel(endpoint, options=OPTIONS)
        else:
            channel = grpc.secure_channel(endpoint, self._credentials, options=OPTIONS)
        try:
            metadata = self._log_in(channel, timeout_s)
        except grpc.RpcError as error:
            channel.close()
            raise _translated(error, endpoint) from error
        maintenance = rpc_pb2_grpc.MaintenanceStub(channel)
        kv, lease = rpc_pb2_grpc.KVStub(channel), rpc_pb2_grpc.LeaseStub(channel)
        calls = {
            "Range": kv.Range,
            "Txn": kv.Txn,
            "Compact": kv.Compact,
            "Status": maintenance.Status,
            "Alarm": maintenance.Alarm,
            "Watch": rpc_pb2_grpc.WatchStub(channel).Watch,
            "LeaseGrant": lease.LeaseGrant,
            "LeaseRevoke": lease.LeaseRevoke,
            "LeaseKeepAlive": lease.LeaseKeepAlive,
        }
        self._connection = _EtcdConnection(endpoint, channel, calls, metadata)
        return self._connection

    def _log_in(self, channel: grpc.Channel, timeout_s: float) -> tuple[tuple[str, str], ...]:
        """Return the metadata with the token, if a user is set. An expired token fails a call, which reconnects and
        logs in again."""
        if self._access.user is None:
            return ()
        request = rpc_pb2.AuthenticateRequest(name=self._access.user, password=self._access.password)
        return (("token", rpc_pb2_grpc.AuthStub(channel).Authenticate(request, timeout=timeout_s).token),)

    def _drop(self, connection: _EtcdConnection) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
        connection.channel.close()


def _credentials(access: EtcdAccess) -> grpc.ChannelCredentials | None:
    if access.ca is None:
        return None
    try:
        ca = access.ca.read_bytes()
        key = None if access.key is None else access.key.read_bytes()
        cert = None if access.cert is None else access.cert.read_bytes()
    except OSError as error:
        raise ConfigError(f"etcd: cannot read {error.filename}: {error.strerror}") from error
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def is_gone(error: KVStoreError) -> bool:
    """Return True if etcd has compacted the requested revision: a retry cannot succeed."""
    cause = error.__cause__
    return isinstance(cause, grpc.Call) and cause.code() is grpc.StatusCode.OUT_OF_RANGE


def _translated(error: Exception, endpoint: str) -> KVStoreError:
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.CANCELLED
    details = error.details() if isinstance(error, grpc.Call) else "the connection was closed"
    if code in UNREACHABLE:
        return CatalogUnavailable(f"etcd unreachable: {endpoint}: {_brief(details)}")
    message = f"etcd refuses: {endpoint}: {code.name}: {details}"
    return ConfigError(message) if code in NOT_MENDED_BY_RETRY else CatalogUnavailable(message)


def _brief(details: str | None) -> str:
    """Return the cause in gRPC's details of a connection failure, without the addresses that it tried."""
    if not details or details == "Deadline Exceeded":
        return "no response in time"
    last = details.rpartition("last error: ")[2]
    cause = _ERRNO.search(last)
    return cause[1] if cause else _PREFIX.sub("", last)[:MAX_DETAILS]
