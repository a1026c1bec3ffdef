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
    """Where the masters are, and how this client uses its connections and memory."""

    master: str = shared_settings.MASTER()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    instance_token: str = shared_settings.INSTANCE_TOKEN()
    deadline_s: float = setting(10.0, "Time for one operation, its retries included.", minimum=0.001, maximum=3600)
    ack: str = setting(
        "node",
        "When a put is answered: `node` once this host's node holds the block, of which the cluster hears within milliseconds; `cluster` "
        "once all can read it. Where this host has no node, `node` is the one of another host that the master last chose for that size, up "
        "to 64 KiB; larger values are answered as by `cluster`.",
        choices=("node", "cluster"),
    )
    copy_threads: int = setting(0, "Threads that copy a large batch; 0: one a processor, 4 at most.", minimum=0, maximum=64)
    use_index: bool = setting(
        True, "Find blocks of nodes on this host in shared memory, without asking. Off: every read is a message, as on another host."
    )
    verify_all: bool = setting(
        False,
        "Compare everything that is read in shared memory with its checksum: large values, batches, and views as they are opened. A bit "
        "that this host's memory has changed is then no hit. It costs a hash of each value, about half as long as its copy.",
    )
    busy_poll_us: int = shared_settings.BUSY_POLL_US()
    connect_timeout_s: float = constant(2.0)
    """Time for one attempt to connect, so that another address can still be tried."""
    owner_patience_s: float = constant(1.0)
    """Where several masters are known: one that has not answered what was asked for so long has the others asked which of them owns the
    catalog, again after each quarter of that; once another one does, that one is asked. What changes something waits for its answer."""
    owner_retry_s: float = constant(0.05)
    """Where several masters are known: pause before they are asked again which of them owns the catalog, while none does; doubles up to
    eight times that. The call waits until its deadline."""
    put_inline_bytes: int = constant(64 << 10)
    """Up to this many bytes, of one value or of a batch's small ones together, are written through the socket even on the same host: it
    saves a round trip."""
    get_inline_bytes: int = constant(16 << 10)
    """Values up to this size are read through the socket even on the same host: it saves a lease."""
    frame_bytes: int = constant(64 << 20)
    """Values that one message moves; larger batches are cut."""
    engine_min_bytes: int = constant(1 << 20)
    """Batches from or to a node of another host go by the transfer engine from this size on; smaller ones along with the message."""
    max_hints: int = constant(262_144)
    """Blocks whose place is remembered: some 50 MB."""
    view_lease_s: float = constant(30.0)
    """How long a view may stay open for which the node had to be asked."""
    read_lease_s: float = constant(10.0)
    """How long a copy out of shared memory may take."""
    verify_bytes: int = constant(64 << 10)
    """Single values up to this size that are read in shared memory are compared with their checksum: the hash takes little beside the call.
    Larger ones are where the processor may change the order of loads (not x86-64)."""
    max_channels: int = constant(1024)
    """Connections to one daemon, half of the descriptors that the process may have (RLIMIT_NOFILE) at most; an open view holds one, and on
    a node's own host its index does. Threads and tasks beyond it wait in turn."""
    peer_timeout_s: float = constant(PEER_TIMEOUT_S)
    """An unused connection over TCP is closed when its daemon's host acknowledges nothing for about this long."""
    idle_ttl_s: float = constant(60.0)
    """Connections unused for this long are closed."""
    is_loaded: bool = loaded_mark()
    """These are complete: a client reads neither environment nor file for what has its default here."""


def resolve_settings(
    settings: ClientSettings | None, *, master: str | Sequence[str] | None, tenant: str | None, token: str | None, deadline_s: float | None
) -> ClientSettings:
    """Settings of one client, each from its strongest source: the arguments (None: not given), then `settings`, then KVSTORE_CLIENT_* and
    KVSTORE_MASTER, then [client] of the file that KVSTORE_CONFIG names, then the default.

    A field of `settings` that has its default counts as not given, unless `load_settings` made them or `is_loaded` is set: then no other
    source is read. Raises InvalidArgument: an argument differs from `settings`. Raises ConfigError: a variable or the file is malformed.
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
    """Tokens are not shown."""
    values = "" if name == "token" else f" ({argument!r} and {in_settings!r})"
    raise InvalidArgument(f"{name} is given twice, as an argument and in settings, with different values{values}: give it once")
