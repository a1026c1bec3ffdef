"""State shared by all calls of one client: connections, location cache, mappings, threads, counters. Used by
metadata_requests.py, reads/ and writes/."""

import os
from typing import TYPE_CHECKING

from kvstore.client.config import ClientSettings
from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.engine_copies import EngineCopies, RemoteMemory
from kvstore.client.connections.locations import LocationCache
from kvstore.client.connections.registered_memory import Registry
from kvstore.client.connections.reservations import ClientReservations, PutTargets
from kvstore.client.connections.routes import IsHere, ShmDiagnostics, nowhere
from kvstore.client.connections.slabs import SlabMapping
from kvstore.client.connections.uncommitted_puts import UncommittedPuts
from kvstore.client.stats import ClientCounters
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import NOT_LOCAL, local_socket_problem
from kvstore.security.tls.config import has_tls
from kvstore.transfer.config import AUTO, TransferSettings
from kvstore.transfer.memory.memcpy import MemcpyPool

if TYPE_CHECKING:
    from kvstore.security.tls.certificates import Certificates


class ClientResources:
    """Shared state of a client. Each part is thread-safe."""

    def __init__(self, settings: ClientSettings, transfer: TransferSettings, *, is_here: IsHere, spread: int) -> None:
        """Raises InvalidArgument for a malformed address, ConfigError for unusable certificates."""
        self.settings = settings
        self.tls = certificates(settings)
        maps = maps_memory(transfer)
        shm_diagnostics = ShmDiagnostics(
            local_socket_problem if maps else lambda unix, host_id: NOT_LOCAL
        )  # without shared memory, nothing to report
        self.daemons = ClusterConnections(
            settings,
            is_here=is_here if maps else nowhere,
            spread=spread,
            shm_diagnostics=shm_diagnostics,
            hello=Hello(ROLE_CLIENT, settings.tenant, name=f"client-{os.getpid()}"),
        )
        self.hints = LocationCache(settings.max_hints)
        self.counters = ClientCounters()
        self.copier = MemcpyPool(settings.copy_threads)
        self.mapping = SlabMapping()
        self.engine_copies = EngineCopies(self.daemons, RemoteMemory(transfer, tls=self.tls), Registry(), self.counters)
        self.reservations = ClientReservations(self.daemons)
        self.uncommitted_puts = UncommittedPuts(self.daemons)
        self.put_targets = PutTargets()

    def close(self) -> None:
        """Stop threads and unmap slabs; open views keep theirs."""
        self.copier.close()
        self.engine_copies.remote.close()
        self.engine_copies.registry.close()
        self.mapping.slabs.close()


def certificates(settings: ClientSettings) -> "Certificates | None":
    """As `Certificates.of`; imports `ssl` only if the settings name TLS."""
    if not has_tls(settings):
        return None
    from kvstore.security.tls.certificates import Certificates

    return Certificates.of(settings)


def maps_memory(transfer: TransferSettings) -> bool:
    """Return whether the configured transports include shared memory."""
    return transfer.transports == AUTO or "shm" in [name.strip() for name in transfer.transports.split(",")]
