"""Settings of a client: flags of the command line, `KVSTORE_CLIENT_*`, or [client] in the TOML file."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NoReturn

from kvstore.protocol import shared_settings
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.settings import constant, load_settings, loaded_mark, setting
from kvstore.rpc.keepalive import PEER_TIMEOUT_S
from kvstore.security.tls.config import TlsSettings

SECTION: Final = "client"


@dataclass(frozen=True, slots=True)
class ClientSettings(TlsSettings):
    """Settings of one client: masters, credentials, connections, leases and limits."""

    master: str = shared_settings.MASTER()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    instance_token: str = shared_settings.INSTANCE_TOKEN()
    deadline_s: float = setting(10.0, "Time for one operation, its retries included.", minimum=0.001, maximum=3600)
    ack: str = setting(
        "node",
        "When a put is acknowledged: `node` once this host's node holds the block, which is committed within milliseconds; `cluster` "
        "once all clients can read it. Without a node on this host, `node` is the node that the master last chose for that size, up "
        "to 64 KiB; larger values are acknowledged as by `cluster`.",
        choices=("node", "cluster"),
    )
    copy_threads: int = setting(0, "Threads that copy a large batch; 0: one a processor, 4 at most.", minimum=0, maximum=64)
    use_index: bool = setting(
        True, "Read blocks of nodes on this host through shared memory, without a message. Off: every read is a message."
    )
    verify_all: bool = setting(
        False,
        "Verify the checksum of everything read in shared memory: large values, batches, and views when opened. A bit flip in this "
        "host's memory then becomes a miss. Costs a hash of each value, about half the time of its copy.",
    )
    busy_poll_us: int = shared_settings.BUSY_POLL_US()
    connect_timeout_s: float = constant(2.0)
    """Time for one connection attempt, so that another address can be tried."""
    owner_patience_s: float = constant(1.0)
    """With several masters: time without a reply after which the other masters are asked for the owner, and again after
    each quarter of it. A retriable request moves to a new owner; other requests wait for their reply."""
    owner_retry_s: float = constant(0.05)
    """With several masters: first pause before they are asked for the owner again while there is none; doubles up to
    eight times that. The call waits until its deadline."""
    put_inline_bytes: int = constant(64 << 10)
    """Largest value, or sum of a batch's small values, that is sent with the message even to a local node: it saves a
    round trip."""
    get_inline_bytes: int = constant(16 << 10)
    """Largest value that a local node sends in its reply: it saves a lease."""
    frame_bytes: int = constant(64 << 20)
    """Values in one message; larger batches are split."""
    engine_min_bytes: int = constant(1 << 20)
    """Smallest batch to or from a remote node that uses the transfer engine; smaller ones travel with the message."""
    max_hints: int = constant(262_144)
    """Capacity of the location cache, in blocks: some 50 MB."""
    view_lease_s: float = constant(30.0)
    """Lease of a view that needed a request to the node."""
    read_lease_s: float = constant(10.0)
    """Lease of a copy out of shared memory."""
    verify_bytes: int = constant(64 << 10)
    """Largest single value read in shared memory that is verified by default: the hash is cheap beside the call. All
    values are verified on processors that may reorder loads (not x86-64)."""
    max_channels: int = constant(1024)
    """Connections to one daemon, at most half of RLIMIT_NOFILE. An open view holds one, and so does the index of a
    local node. Further threads and tasks queue."""
    peer_timeout_s: float = constant(PEER_TIMEOUT_S)
    """Keepalive timeout: an idle TCP connection is closed when the peer's host acknowledges nothing for about this
    long."""
    idle_ttl_s: float = constant(60.0)
    """Idle connections are closed after this time."""
    is_loaded: bool = loaded_mark()
    """The settings are complete: a client reads neither environment nor file for fields with their default."""


def resolve_settings(
    settings: ClientSettings | None, *, master: str | Sequence[str] | None, tenant: str | None, token: str | None, deadline_s: float | None
) -> ClientSettings:
    """Settings of one client, each from its strongest source: arguments (None: not given), `settings`, KVSTORE_CLIENT_*
    and KVSTORE_MASTER, [client] of the file that KVSTORE_CONFIG names, the default.

    A field of `settings` with its default counts as not given, unless `load_settings` made them or `is_loaded` is set:
    then no other source is read. Raises InvalidArgument: an argument differs from `settings`. Raises ConfigError: a
    variable or the file is malformed.
    """
    addresses = master if isinstance(master, str) or master is None else ",".join(master)
    given = {"master": addresses, "tenant": tenant, "token": token, "deadline_s": deadline_s}
    arguments: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    chosen = _chosen(settings) if settings is not None else {}
    for name, value in arguments.items():
        if name in chosen and chosen[name] != value:
            _refuse(name, value, chosen[name])
    if settings is not None and settings.is_loaded:
        return replace(settings, **arguments)
    return replace(load_settings(ClientSettings, SECTION, flags={}), **{**chosen, **arguments})


def _chosen(settings: ClientSettings) -> dict[str, Any]:
    """Fields of `settings` that differ from their default."""
    found = {field.name: (getattr(settings, field.name), field.default) for field in fields(ClientSettings) if field.compare}
    return {name: value for name, (value, default) in found.items() if value != default}


def _refuse(name: str, argument: object, in_settings: object) -> NoReturn:
    """Raise InvalidArgument, without showing tokens."""
    values = "" if name == "token" else f" ({argument!r} and {in_settings!r})"
    raise InvalidArgument(f"{name} is given twice, as an argument and in settings, with different values{values}: give it once")
