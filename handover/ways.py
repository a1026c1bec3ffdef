"""How bytes go from one rank to another: which way, and whether gathered. Decided by the receiver, for each pair of ranks."""

from typing import NamedTuple

from kvstore.handover.core import Core
from kvstore.handover.description import RankInfo, is_same_host
from kvstore.kvcache.layouts.formatter import Remapping
from kvstore.protocol.errors import ConfigError, Unreachable
from kvstore.protocol.handover_messages import PULL, PUSH, STREAM
from kvstore.transfer.paths.peer import Peer


class Way(NamedTuple):
    """PUSH, PULL or STREAM; the size of gathered parts, 0 if bytes go straight between the pools; the engine's peer."""

    way: int
    part_bytes: int
    peer: Peer | None


def choose_way(core: Core, info: RankInfo, remapping: Remapping) -> Way:
    """The way from the sender `info` to this rank. Raises ConfigError (the way that the settings name needs what is not there), Unreachable
    (no transport in common), ProtocolError."""
    settings = core.settings
    peer, failure = None, None
    if core.engine is not None and info.engine and settings.way != "stream":
        try:
            peer = core.engine.connect(info.engine)
        except Unreachable as error:
            failure = error
    if peer is None:
        return _stream(core, failure)
    is_pull = settings.way == "pull" or (settings.way == "auto" and _is_shared_memory_first(peer) and is_same_host(info))
    is_shm_only = {path.transport for path in peer.routes} == {"shm"}
    is_short = remapping.run_bytes(info.rank, core.rank) < settings.direct_min_bytes
    # Memory that only shared memory reaches, and is none, goes through staging, which is.
    is_staged = is_short or (is_pull and is_shm_only and not info.is_shared)
    if is_shm_only and not is_pull:
        raise ConfigError("way is push, but only shared memory is common to both ranks, which may not write: set way to auto or pull")
    return Way(PULL if is_pull else PUSH, settings.staging_part_bytes if is_staged else 0, peer)


def _stream(core: Core, failure: Unreachable | None) -> Way:
    if core.streams is None:
        raise failure or ConfigError("neither a transfer engine nor a Connection is common to both ranks: pass one to the transceiver")
    if core.settings.way in ("push", "pull"):
        raise failure or ConfigError(f"way is {core.settings.way}, but there is no transfer engine: set way to auto or stream")
    return Way(STREAM, core.settings.staging_part_bytes, None)


def _is_shared_memory_first(peer: Peer) -> bool:
    path, _ = min(peer.routes.items(), key=lambda item: item[1].facts.preference)
    return path.transport == "shm"
