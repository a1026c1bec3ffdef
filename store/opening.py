"""What a node's settings come to before it runs: whether they go together, its tiers, and the blocks that outlived its last process."""

import logging
import os
from typing import Final

from kvstore.protocol.errors import ConfigError, ProtocolError
from kvstore.rpc.access import SocketAccess
from kvstore.rpc.address import parse_address
from kvstore.store.blocks.block import DRAM, HBM, NVME, Block
from kvstore.store.blocks.rows import BlockRows
from kvstore.store.blocks.tags import from_recovered
from kvstore.store.config import NodeSettings, split_place
from kvstore.store.memory_plan import MemoryPlan, check_limit
from kvstore.tiers.dram import DramTier
from kvstore.tiers.memory_limit import memory_limit
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.tier import Tier
from kvstore.tiers.value_codec import require_torch

WILDCARDS: Final = ("0.0.0.0", "::")
log = logging.getLogger("kvstore.store")


def check(settings: NodeSettings) -> None:
    """Raises ConfigError or InvalidArgument for settings that contradict one another, or addresses that are none."""
    if settings.low_watermark > settings.high_watermark:
        raise ConfigError("low_watermark is above high_watermark: blocks could never be demoted far enough")
    if settings.nvme_codec != "none" and not settings.nvme:
        raise ConfigError(f"nvme_codec is {settings.nvme_codec!r}, but there is no NVMe tier: say with nvme DIR:SIZE where it is")
    if parse_address(settings.listen).unix:
        raise ConfigError(f"listen is {settings.listen!r}: write HOST:PORT; the Unix socket is made in run_dir")
    if parse_address(settings.listen).host in WILDCARDS and not settings.advertise:
        raise ConfigError(f"listen {settings.listen} is every interface: say with advertise HOST:PORT where clients reach this node")
    if settings.advertise and parse_address(settings.advertise).unix:
        raise ConfigError(f"advertise is {settings.advertise!r}: write HOST:PORT, for clients of other hosts")
    SocketAccess.chosen(settings.socket_group, settings.socket_mode)


def open_tiers(settings: NodeSettings, plan: MemoryPlan) -> dict[int, Tier]:
    """The tiers that are configured, by index. Raises ConfigError, also where the plan exceeds the memory limit; those already opened are
    closed then."""
    tiers: dict[int, Tier] = {}
    try:
        dram = DramTier(plan.dram_bytes, hugepages=settings.hugepages, transparent_hugepages=settings.transparent_hugepages)
        tiers[DRAM] = dram
        check_limit(settings, plan, memory_limit(), has_reserved_pages=dram.hugepages)
        if settings.nvme:
            folder, size_bytes = split_place(settings.nvme, "nvme")
            is_new = not os.path.exists(folder)  # Path.exists raises where a directory above may not be entered
            tiers[NVME] = NvmeTier(folder, capacity_bytes=size_bytes)
            if is_new and os.stat(folder).st_dev == os.stat("/").st_dev:
                log.warning("the NVMe folder %s is new, and on the disk of /: if one of its own was to be mounted there, it is not", folder)
        if settings.hbm:
            from kvstore.tiers.hbm import HbmTier  # torch takes seconds to import, and most nodes have no HBM tier

            device, size_bytes = split_place(settings.hbm, "hbm")
            tiers[HBM] = HbmTier(size_bytes, device)
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    return tiers


def readable_blocks(tier: Tier, rows: BlockRows) -> list[Block]:
    """What a durable tier held, as blocks that `rows` made; a value whose tag cannot be read is given up.

    Raises ConfigError: there are encoded values, and nothing that could decode them.
    """
    blocks = []
    for found in tier.recover():
        try:
            blocks.append(from_recovered(found, rows))
        except ProtocolError as error:
            log.warning("a stored block is given up: %s", error)
            tier.free(found.slot)
    if any(loss is not None and loss.encoding is not None for block in blocks for loss in block.lossy):
        require_torch(f"what the {tier.name} tier holds is encoded, and is decoded")
    return blocks
