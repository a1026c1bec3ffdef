"""Description of a rank for other ranks: its control address, layout, and transfer engine, as bytes that any channel
may carry.

A description is a capability: its holder can request the cache of any request whose id it knows. Received descriptions
are validated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.protocol.wire import Reader, Writer
from kvstore.rpc.address import Address, host_id, parse_address

MAGIC: Final = b"kvhand"
VERSION: Final = 1
INSTANCE_BYTES: Final = 16
MAX_DESCRIPTION_BYTES: Final = 512 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Contents of one rank's description."""

    instance: bytes
    """Random per run: another process at the same address has another one."""
    rank: int
    control: Address
    layout: CacheLayout
    engine: bytes
    """Description of its transfer engine."""
    host: str = ""
    is_shared: bool = False
    """Its pool is shared memory, which local processes can map."""

    @property
    def dp(self) -> int:
        """Attention-DP group of the rank."""
        return self.layout.parallel.group_of(self.rank)

    def pack(self) -> bytes:
        writer = Writer().u8s(MAGIC).u8(VERSION).u8s(self.instance).u32(self.rank).u8(int(self.is_shared))
        writer.text(str(self.control)).text(self.host).blob(self.layout.to_bytes()).blob(self.engine)
        return writer.done()


def unpack(data: bytes) -> RankInfo:
    """Decode a description. Raises ProtocolError: malformed, or of another version."""
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise ProtocolError(f"a rank's description of {len(data)} bytes is over the limit of {MAX_DESCRIPTION_BYTES}")
    reader = Reader(data)
    if reader.u8s(len(MAGIC)) != MAGIC:
        raise ProtocolError("these bytes do not describe a rank of a hand-over")
    if (version := reader.u8()) != VERSION:
        raise ProtocolError(f"the peer hands over in version {version}, this side in {VERSION}: run the same release on both")
    instance, rank, is_shared = reader.u8s(INSTANCE_BYTES), reader.u32(), bool(reader.u8())
    control, host = reader.text(), reader.text()
    layout, engine = CacheLayout.from_bytes(reader.blob()), reader.blob()
    reader.end()
    try:
        address = parse_address(control)
        layout.parallel.coordinates(rank)
    except InvalidArgument as error:
        raise ProtocolError(f"a rank's description is invalid: {error}") from None
    return RankInfo(instance=instance, rank=rank, control=address, layout=layout, engine=engine, host=host, is_shared=is_shared)


@dataclass(frozen=True, slots=True)
class RemoteExecutor:
    """All ranks of another executor, in order. Created by `CacheTransceiver.connect`."""

    ranks: tuple[RankInfo, ...]

    @property
    def layout(self) -> CacheLayout:
        return self.ranks[0].layout


def executor(descriptions: Sequence[bytes]) -> RemoteExecutor:
    """Return the executor of these descriptions, in any order.

    Raises ProtocolError: not descriptions of this version. Raises InvalidArgument: a rank is missing or duplicated, or
    layouts differ.
    """
    ranks = sorted((unpack(description) for description in descriptions), key=lambda info: info.rank)
    if not ranks:
        raise InvalidArgument("an executor has at least one rank: pass the descriptions of all of them")
    layout = ranks[0].layout
    if any(info.layout != layout for info in ranks):
        raise InvalidArgument("these ranks have different layouts: they are not of one executor")
    if [info.rank for info in ranks] != list(range(layout.parallel.ranks)):
        raise InvalidArgument(
            f"ranks {[info.rank for info in ranks]} were described; the executor has ranks 0 to {layout.parallel.ranks - 1}"
        )
    return RemoteExecutor(tuple(ranks))


def is_same_host(info: RankInfo) -> bool:
    """Return whether that rank's process shares this one's kernel."""
    return info.host == host_id()
