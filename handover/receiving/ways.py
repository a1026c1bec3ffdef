"""How bytes go from one rank to another: which way, and whether gathered. Decided by the receiver, for each pair of ranks."""

from typing import NamedTuple

from kvstore.handover.description import RankInfo, is_same_host
from kvstore.handover.resources import RankResources
from kvstore.kvcache.layouts.formatter import Remapping
from kvstore.protocol.errors import ConfigError, Unreachable
from kvstore.protocol.handover_messages import PULL, PUSH, STREAM
from kvstore.transfer.paths.peer import Peer


class Way(NamedTuple):
    """PUSH, PULL or STREAM; the size of gathered parts, 0 if bytes go straight between the pools; the engine's peer."""

    way: int
    part_bytes: int
    peer: Peer | None


def choose_way(resources: RankResources, info: RankInfo, remapping: Remapping) -> Way:
    """The way from the sender `info` to this rank. Raises ConfigError (the way that the settings name needs what is not there), Unreachable
    (no transport in common), ProtocolError."""
    settings = resources.settings
    peer, failure = None, None
    if resources.engine is not None and info.engine and settings.way != "stream":
        try:
            peer = resources.connect(info)
        except Unreachable as error:
            failure = error
    if peer is None:
        return _stream(resources, failure)
    is_pull = settings.way == "pull" or (settings.way == "auto" and _is_shared_memory_first(peer) and is_same_host(info))
    is_shm_only = {path.transport for path in peer.routes} == {"shm"}
    is_short = remapping.run_bytes(info.rank, resources.rank) < settings.direct_min_bytes
    # Memory that only shared memory reaches, and is none, goes through staging, which is.
    is_staged = is_short or (is_pull and is_shm_only and not info.is_shared)
    if is_shm_only and not is_pull:
        raise ConfigError("way is push, but only shared memory is common to both ranks, which may not write: set way to auto or pull")
    return Way(PULL if is_pull else PUSH, settings.staging_part_bytes if is_staged else 0, peer)


def _stream(resources: RankResources, failure: Unreachable | None) -> Way:
    if resources.streams is None:
        raise failure or ConfigError("neither a transfer engine nor a Connection is common to both ranks: pass one to the transceiver")
    if resources.settings.way in ("push", "pull"):
        raise failure or ConfigError(f"way is {resources.settings.way}, but there is no transfer engine: set way to auto or stream")
    return Way(STREAM, resources.settings.staging_part_bytes, None)


def _is_shared_memory_first(peer: Peer) -> bool:
    path, _ = min(peer.routes.items(), key=lambda item: item[1].facts.preference)
    return path.transport == "shm"
