"""Common base of both clients: constructor, settings, and calls without I/O."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kvstore.client.config import ClientSettings, resolve_settings
from kvstore.client.connections.registered_memory import RegisteredMemory
from kvstore.client.core.arguments import check_arguments, check_kind
from kvstore.client.operations import Operations
from kvstore.client.stats import ClientMetrics, ClientStats, Timings
from kvstore.client.tracing import trace_calls
from kvstore.transfer.config import TransferSettings

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.config import TracingSettings


class BaseClient:
    """Base of `Client` and `AsyncClient`, which add a driver of operations."""

    def __init__(
        self,
        master: str | Sequence[str] | None = None,
        *,
        tenant: str | None = None,
        token: str | None = None,
        deadline_s: float | None = None,
        settings: ClientSettings | None = None,
        transfer: TransferSettings | None = None,
        tracing: "TracingSettings | None" = None,
    ) -> None:
        """Does no I/O; connects at the first call.

        Args:
            master: `host:port` or `unix:/path`, or several, as a list or separated by commas. The owner of the catalog is found among them.
            tenant: owner of the blocks; `token`, or the certificate of `settings`, proves it.
            deadline_s: default time for one call.
            settings: all of these and TLS, connections, leases and limits.
            transfer: transports, rails and limits of the transfer engine.
            tracing: collector of spans (docs/tracing.md). None: as KVSTORE_TRACING_* and the file that KVSTORE_CONFIG names.

        Values missing from arguments and `settings` come from KVSTORE_CLIENT_* (KVSTORE_MASTER), then [client] of the
        file that KVSTORE_CONFIG names, then the default. Raises InvalidArgument: malformed, or an argument differs from
        `settings`. Raises ConfigError: a variable, the file or a certificate cannot be used.
        """
        check_arguments(master, tenant, token, deadline_s)
        check_kind(settings, ClientSettings, "settings")
        check_kind(transfer, TransferSettings, "transfer")
        resolved = resolve_settings(settings, master=master, tenant=tenant, token=token, deadline_s=deadline_s)
        self._operations = Operations(resolved, transfer)
        self._timings = Timings()
        self._connect()
        self.tracing = trace_calls(self, tracing, name=self._operations.hello.name)
        """Creates spans of the calls; None: tracing is off."""

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: a program that hands a client to another process has to create one there."""
        raise TypeError(f"a {type(self).__name__} has connections and cannot be pickled or copied: create one in each process")

    def _connect(self) -> None:
        """Create the driver. Does no I/O."""
        raise NotImplementedError

    @property
    def settings(self) -> ClientSettings:
        """Settings of the client, with its masters, tenant, token and deadline."""
        return self._operations.settings

    def register(self, buffer: Any, *, location: str = "") -> RegisteredMemory:
        """Register a buffer with the transfer engine until the result is closed, instead of per transfer. Sends
        nothing.

        Worthwhile for a pool of blocks that is filled by RDMA. Any part of the buffer may be read into or written from.
        The buffer (numpy array, CPU tensor, or any other buffer, of any size) must stay allocated. `location` is its
        NUMA node, "cpu:N"; by default that of its first page. Rails near it are preferred. Raises InvalidArgument (no
        host memory, or partly registered already), Closed, Forked.
        """
        return self._operations.register(buffer, location)

    def exists_here(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are readable through shared memory on this host. Sends nothing and never blocks.

        False for all other blocks, and for all before this client's first read here. Useful while the cluster is
        unreachable.
        """
        return self._operations.exists_here(keys)

    def metrics(self) -> ClientMetrics:
        """Metrics of this client for a registry of prometheus_client: `client.metrics().register()`
        (docs/metrics.md)."""
        return ClientMetrics(self.stats, self._timings, self.tracing)

    def stats(self) -> ClientStats:
        """Counters of this client. Sends nothing."""
        return self._operations.stats()
