"""Client of the other masters' control planes, with the keys that they published in the catalog.

Calls block, so they are never made in the loop's thread. A master that has stopped or moved is known as soon as the
catalog reports it; until then calls to it end at their deadline."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc

from kvstore.master.catalogs.interface import PeerMaster
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.partitions import as_metadata
from kvstore.rpc.grpc_errors import translated
from kvstore.rpc.keepalive import grpc_options
from kvstore.security.actor import THIS_MASTER, Actor
from kvstore.security.grpc_metadata import MASTER_KEY, on_behalf_of
from kvstore.security.tls.certificates import Certificates, Pems
from kvstore.security.tls.grpc_credentials import open_channel

RECONNECT_MS: Final = 1000
"""Maximum reconnection back-off: a restarted master is reachable again soon."""


class PeerMasters:
    """Calls to other masters. Thread-safe."""

    def __init__(self, known: Callable[[], Mapping[str, PeerMaster]], *, tls: Certificates | None, peer_timeout_s: float) -> None:
        """`known` returns the live masters by frames address. Nothing is connected yet."""
        self.known = known
        self._tls = tls
        self._options = [*grpc_options(peer_timeout_s), ("grpc.max_reconnect_backoff_ms", RECONNECT_MS)]
        self._channels: dict[str, tuple[Pems | None, grpc.Channel]] = {}
        """By control plane address."""
        self._lock = threading.Lock()

    def call(self, address: str, method: str, request: Any, *, partition: int = 0, timeout_s: float, actor: Actor = THIS_MASTER) -> Any:
        """Call the control plane of the master at `address`, about a partition, and return the response; a stream as
        a list. `actor` is recorded in the audit trail. Raises Unavailable, and the response's error."""
        return self.begin(address, method, request, partition=partition, timeout_s=timeout_s, actor=actor)()

    def begin(
        self, address: str, method: str, request: Any, *, partition: int = 0, timeout_s: float, actor: Actor = THIS_MASTER
    ) -> Callable[[], Any]:
        """Start a call as `call`; the returned function waits for its response. So several can be made in parallel.
        Raises Unavailable."""
        peer_master = self.known().get(address)
        if peer_master is None or not peer_master.contact.control:
            raise Unavailable("the catalog has no contact of this master: it has stopped, or its entry is damaged")
        call: Any = getattr(self._stub(peer_master.contact.control), method)
        metadata = ((MASTER_KEY, peer_master.contact.key), *on_behalf_of(actor), *as_metadata(partition))
        is_stream = isinstance(call, grpc.UnaryStreamMultiCallable)
        under_way = (call if is_stream else call.future)(request, timeout=timeout_s, metadata=metadata)

        def answer() -> Any:
            try:
                return list(under_way) if is_stream else under_way.result()
            except grpc.RpcError as error:
                raise translated(error) from None
            except grpc.FutureCancelledError:
                raise Unavailable("this master stops") from None

        return answer

    def close(self) -> None:
        """Cancel the calls under way. Later calls open new channels."""
        with self._lock:
            for _pems, channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _stub(self, place: str) -> ControlStub:
        """Raises Unavailable."""
        if self._tls is not None and self._tls.serves and not self._tls.connects:
            raise Unavailable("calls between masters use TLS: set tls_ca at this master")
        pems = self._tls.pems() if self._tls is not None else None
        with self._lock:
            kept = {peer_master.contact.control for peer_master in self.known().values()}
            for other, (made_with, channel) in list(self._channels.items()):
                if other not in kept or made_with != pems:  # a channel reconnects with the certificate that it was made with
                    channel.close()
                    del self._channels[other]
            if place not in self._channels:
                self._channels[place] = pems, open_channel(place, self._tls, self._options)
            return ControlStub(self._channels[place][1])  # type: ignore[no-untyped-call]
