"""Promises of blocks.py, in a real store."""

import pytest

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Corrupt
from kvstore.router.fake_engine.blocks import BATCH_BLOCKS, BlockStore, PinnedNodeClient


def namespace(model: str) -> Namespace:
    return Namespace(model=model, dtype="bfloat16", block_tokens=1)


@pytest.mark.parametrize("block_bytes", [1, 1000, 4096])
async def test_what_is_stored_is_loaded_and_the_first_miss_ends_it(two_nodes: LocalCluster, block_bytes: int) -> None:
    of = namespace(f"blocks of {block_bytes}")
    keys = of.block_keys(range(BATCH_BLOCKS + 20))
    stored = BATCH_BLOCKS + 10

    async with PinnedNodeClient(two_nodes.address, "node-0", tenant="", token="") as client:
        blocks = BlockStore(client, of, block_bytes)
        assert await blocks.load(keys) == 0
        await blocks.store(keys[:stored], 0)
        assert await blocks.load(keys) == stored
        assert await blocks.load([]) == 0
        assert len(await client.get(keys[0]) or b"") == block_bytes
        await blocks.store(keys, stored)
        assert await blocks.load(keys) == len(keys)


@pytest.mark.parametrize("node", ["node-0", "node-1"])
async def test_blocks_go_to_the_node_that_the_client_is_tied_to(two_nodes: LocalCluster, node: str) -> None:
    of = namespace(node)
    keys = of.block_keys(range(5))

    async with PinnedNodeClient(two_nodes.address, node, tenant="", token="") as client:
        for block_bytes, part in ((100, keys[:2]), (100_000, keys[2:])):
            await BlockStore(client, of, block_bytes).store(part, 0)
        assert [[replica.node for replica in replicas] for replicas in await client.locate(keys)] == [[node]] * 5


async def test_wrong_bytes_are_found_out(two_nodes: LocalCluster) -> None:
    of = namespace("corrupt")
    keys = of.block_keys(range(3))

    async with PinnedNodeClient(two_nodes.address, "node-0", tenant="", token="") as client:
        blocks = BlockStore(client, of, 100)
        await client.put(keys[1], bytes(100), namespace=of)
        await blocks.store(keys, 0)
        with pytest.raises(Corrupt, match=f"block {keys[1].hex()} has other bytes than were put"):
            await blocks.load(keys)
