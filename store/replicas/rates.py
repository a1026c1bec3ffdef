"""How fast other nodes' blocks came lately, as the node's engine measured it while they were fetched: what it tells its master."""

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.message import MAX_RATES
from kvstore.transfer.paths.path_chooser import Measured


class SourceRates:
    """The newest measurement of each of the MAX_RATES sources measured last. Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self._rates: dict[int, Measured] = {}

    def note(self, node_id: int, measured: Measured | None) -> None:
        """Blocks of that node have come; None: nothing was measured by that."""
        if measured is None:
            return
        self._rates.pop(node_id, None)
        self._rates[node_id] = measured
        if len(self._rates) > MAX_RATES:
            del self._rates[next(iter(self._rates))]

    def told(self, now_ns: int) -> list[pb.PeerRate]:
        """For a heartbeat. How old a rate may be that still counts is the master's to say."""
        return [
            pb.PeerRate(
                node_id=node_id,
                bytes_per_s=measured.bytes_s,
                basis_bytes=measured.basis_bytes,
                age_s=max(0, now_ns - measured.measured_ns) / 1e9,
            )
            for node_id, measured in self._rates.items()
        ]
