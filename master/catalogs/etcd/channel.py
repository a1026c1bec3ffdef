"""A connection to one etcd endpoint of several, with TLS and a token, replaced by the next one when a call fails.

aetcd's Client knows one endpoint and no TLS, so only its generated messages are taken. A channel at a time, to one endpoint, rather
than a gRPC list of addresses: certificates are checked against the name that was asked for, and names and addresses may be mixed.
"""

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
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),  # Room for the largest answer asked for, a page of a load.
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
"""Characters of gRPC's own words that are told."""
_ERRNO = re.compile(r"([^:; ][^:;]*) \(\d+\)$")
_PREFIX = re.compile(r"^(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?")
UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """Who and what to trust. `ca` (PEM) turns TLS on; `cert` and `key` (PEM, both or none) say who we are; `user` logs in."""

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
    """The answer to come of one call. `result` may be asked for once, from any thread."""

    def __init__(self, owner: "EtcdChannel", connection: _EtcdConnection, future: Any) -> None:
        self._owner = owner
        self._connection = connection
        self._future = future

    def result(self) -> Any:
        """Wait for the answer, at most until the call's deadline.

        Raises CatalogUnavailable or ConfigError; the connection has been dropped then, and whether the call took effect is unknown.
        """
        try:
            return self._future.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            self._owner._drop(self._connection)
            raise _translated(error, self._connection.endpoint) from error


class ReplyStream:
    """The answers of a call that lasts. One thread iterates; `cancel` may be called from any, and ends the iteration with an error."""

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
    """Calls into etcd. Thread-safe; threads share the connection, and lose it together."""

    def __init__(self, endpoints: Sequence[str], access: EtcdAccess) -> None:
        """`endpoints` are `host:port`, at least one, tried in this order; `access`'s files are read at once, and again with each
        connection.

        Raises ConfigError when a file cannot be read.
        """
        self._endpoints = tuple(endpoints)
        self._access = access
        self._credentials = _credentials(access)  # refused now if not when it connects
        self._lock = threading.Lock()
        self._connection: _EtcdConnection | None = None
        self._next_endpoint = 0
        self._closed = False

    def start(self, method: str, request: Any, *, timeout_s: float) -> Reply:
        """Send a request (a name of `_connect`'s calls that are answered once), connecting and logging in first if need be.

        Raises as Reply.result does.
        """
        with self._lock:
            connection = self._connection or self._connect(timeout_s)
            future = connection.calls[method].future(request, timeout=timeout_s, metadata=connection.metadata)
        return Reply(self, connection, future)

    def call(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """`start` and wait."""
        return self.start(method, request, timeout_s=timeout_s).result()

    def stream(self, method: str, requests: Iterator[Any], *, connect_timeout_s: float, timeout_s: float | None = None) -> ReplyStream:
        """Begin a call (`Watch`, `LeaseKeepAlive`) that takes requests as they come, in a thread of its own, and answers as it likes.

        A server that has lost its leader ends it. Raises as Reply.result does.
        """
        with self._lock:
            connection = self._connection or self._connect(connect_timeout_s)
            metadata = (*connection.metadata, ("hasleader", "true"))
            call = connection.calls[method](requests, timeout=timeout_s, metadata=metadata)
        return ReplyStream(self, connection, call)

    def close(self) -> None:
        """Cancel the calls under way and refuse later ones with CatalogUnavailable. A second close is a no-op.

        Waits for a login under way, so at most that call's deadline.
        """
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
        with contextlib.suppress(ConfigError):  # being exchanged: the former go on
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
        """The metadata that carries the token, if there is a user. An expired token fails a call, and so leads back here."""
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
    """Whether what was asked for is no more, however often it is asked again: etcd compacted that state away."""
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
    """The cause in what gRPC says of a connection, without the addresses that it tried."""
    if not details or details == "Deadline Exceeded":
        return "no answer in time"
    last = details.rpartition("last error: ")[2]
    cause = _ERRNO.search(last)
    return cause[1] if cause else _PREFIX.sub("", last)[:MAX_DETAILS]
