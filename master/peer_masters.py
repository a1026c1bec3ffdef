"""The other masters of a cluster, asked over their control planes: by the keys that they have given in the catalog.

Who calls waits, so it is never the loop's thread. One that has gone, or was started again elsewhere, is known as such as soon as the
catalog says so; until then a question to it ends by its deadline.
"""

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
"""At most, between tries of a connection that is wanted: one that was started again is soon seen again."""


class PeerMasters:
    """See the module. Thread-safe."""

    def __init__(self, known: Callable[[], Mapping[str, PeerMaster]], *, tls: Certificates | None, peer_timeout_s: float) -> None:
        """`known`: those that live, by the address of their frames. Nobody is asked yet."""
        self.known = known
        self._tls = tls
        self._options = [*grpc_options(peer_timeout_s), ("grpc.max_reconnect_backoff_ms", RECONNECT_MS)]
        self._channels: dict[str, tuple[Pems | None, grpc.Channel]] = {}
        """By the place of the control plane."""
        self._lock = threading.Lock()

    def ask(self, address: str, method: str, request: Any, *, partition: int = 0, timeout_s: float, actor: Actor = THIS_MASTER) -> Any:
        """What the master at `address` answers to a call of its control plane about a partition; of one that answers with a stream, all of
        it in a list. `actor` is who asks for it, for the audit trail. Raises Unavailable, and what it answers with."""
        return self.begin(address, method, request, partition=partition, timeout_s=timeout_s, actor=actor)()

    def begin(
        self, address: str, method: str, request: Any, *, partition: int = 0, timeout_s: float, actor: Actor = THIS_MASTER
    ) -> Callable[[], Any]:
        """As `ask`, which the call of what is returned waits for: several can be asked at once. Raises Unavailable."""
        fellow = self.known().get(address)
        if fellow is None or not fellow.contact.control:
            raise Unavailable("the catalog does not say how it is asked: it has ended, or its entry is damaged")
        call: Any = getattr(self._stub(fellow.contact.control), method)
        shown = ((MASTER_KEY, fellow.contact.key), *on_behalf_of(actor), *as_metadata(partition))
        is_stream = isinstance(call, grpc.UnaryStreamMultiCallable)
        under_way = (call if is_stream else call.future)(request, timeout=timeout_s, metadata=shown)

        def answer() -> Any:
            try:
                return list(under_way) if is_stream else under_way.result()
            except grpc.RpcError as error:
                raise translated(error) from None
            except grpc.FutureCancelledError:
                raise Unavailable("this master stops") from None

        return answer

    def close(self) -> None:
        """Ends the questions under way; there may be others."""
        with self._lock:
            for _pems, channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _stub(self, place: str) -> ControlStub:
        """Raises Unavailable."""
        if self._tls is not None and self._tls.serves and not self._tls.connects:
            raise Unavailable("masters ask one another by TLS, for which this one needs tls_ca")
        pems = self._tls.pems() if self._tls is not None else None
        with self._lock:
            kept = {fellow.contact.control for fellow in self.known().values()}
            for other, (made_with, channel) in list(self._channels.items()):
                if other not in kept or made_with != pems:  # a connection made anew shows the certificate that its channel was made with
                    channel.close()
                    del self._channels[other]
            if place not in self._channels:
                self._channels[place] = pems, open_channel(place, self._tls, self._options)
            return ControlStub(self._channels[place][1])  # type: ignore[no-untyped-call]
