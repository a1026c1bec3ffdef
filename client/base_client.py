"""What both clients share: their arguments, the operations that they carry out, and the calls that ask nobody."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    """`Client` and `AsyncClient`, but for what drives their operations."""

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
        """Does no I/O: it connects at the first call.

        Args:
            master: `host:port` or `unix:/path`, or several, in a list or separated by commas: the one that owns the catalog is asked,
                which the others name.
            tenant: whose blocks are seen; `token`, or the certificate of `settings`, proves it.
            deadline_s: the time for one call, unless it names its own.
            settings: all of these and TLS, connections, leases and limits.
            transfer: how values move: transports, rails and limits of the transfer engine.
            tracing: where spans of the calls go, if anywhere (docs/tracing.md). None: as KVSTORE_TRACING_* and the file that KVSTORE_CONFIG
                names say.

        What neither an argument nor `settings` gives is read where the command line reads it: KVSTORE_CLIENT_* (KVSTORE_MASTER), then
        [client] of the file that KVSTORE_CONFIG names, then the default. Raises InvalidArgument: malformed, or an argument differs from
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
        """Makes spans of the calls; None: nothing is traced."""

    def _connect(self) -> None:
        """Make the driver of the operations. Does no I/O."""
        raise NotImplementedError

    @property
    def settings(self) -> ClientSettings:
        """Settings of the client, with its masters, tenant, token and deadline."""
        return self._operations.settings

    def register(self, buffer: Any, *, location: str = "") -> RegisteredMemory:
        """Have the transfer engine know a buffer for good, until the result is closed, instead of for each call that reads into it or
        writes from it, or from any part of it: worth it for a pool of blocks where values come from other hosts by RDMA.

        The buffer (a numpy array, a CPU tensor, any writable or constant buffer, of any size) must stay as long. `location` is where
        it lies, "cpu:N" with its NUMA node, by default where its first page is: rails near it are preferred. Asks nobody. Raises
        InvalidArgument (no memory of this host, or some of it is registered already), Closed, Forked.
        """
        return self._operations.register(buffer, location)

    def exists_here(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the blocks can be read on this host, as far as its nodes show them in shared memory? Asks nobody and never waits: for
        when nobody answers. False is said of all others, and of all where this client has read nothing here yet."""
        return self._operations.exists_here(keys)

    def metrics(self) -> ClientMetrics:
        """What this client measures, for a registry of prometheus_client: `client.metrics().register()` (docs/metrics.md)."""
        return ClientMetrics(self.stats, self._timings, self.tracing)

    def stats(self) -> ClientStats:
        """What this client did so far. Asks nobody."""
        return self._operations.stats()
