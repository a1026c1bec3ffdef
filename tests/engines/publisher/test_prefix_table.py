"""Promises of prefix_table.py: which instance has how much of a prompt, in which medium."""

import pytest

from kvstore.engines.kv_events.events import CPU, DISK, AllBlocksCleared, BlocksRemoved, BlocksStored
from kvstore.engines.publisher import prefix_table as module
from kvstore.engines.publisher.prefix_table import Context, PrefixTable, RankMatch, Service
from kvstore.kvcache.key_names import NamespaceNaming
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Full, InvalidArgument

CONTEXT = Context("default", "m", "", "", 2)
NAMING = NamespaceNaming(Namespace(model="m", dtype="float32", block_tokens=2))
TOKENS = list(range(10))
KEYS = NAMING.block_keys(TOKENS)


def service(instance: str = "a", rank: int = 0, context: Context = CONTEXT) -> Service:
    return Service(context, instance, rank, f"tcp://{instance}:{rank}", "")


def stored(start: int, stop: int) -> BlocksStored:
    """Blocks [start, stop) of the prompt; the engine calls block i 100 + i."""
    return BlocksStored([100 + index for index in range(start, stop)], 99 + start if start else None, TOKENS[2 * start : 2 * stop], 2, True)


def copied(start: int, stop: int, medium: str) -> BlocksStored:
    return BlocksStored([100 + index for index in range(start, stop)], None, [], 0, True, medium=medium)


@pytest.fixture
def table() -> PrefixTable:
    return PrefixTable(lambda context: NAMING)


def tokens(table: PrefixTable, instance: str = "a", rank: int = 0) -> tuple[int, int, int]:
    found = table.match(CONTEXT, KEYS)[instance].ranks[rank]
    return found.gpu, found.cpu, found.disk


def test_each_medium_goes_on_where_the_one_before_ends(table: PrefixTable) -> None:
    own = service()
    assert table.add(own)
    table.apply(own, [stored(0, 4), copied(1, 4, CPU), BlocksRemoved([102, 103])])
    assert tokens(table) == (4, 8, 8)
    assert table.match(CONTEXT, KEYS)["a"].alone == {"gpu": 4, "cpu": 0, "disk": 0}
    assert table.match(CONTEXT, KEYS)["a"].longest == 8
    table.apply(own, [copied(0, 1, DISK), BlocksRemoved([100], CPU), BlocksRemoved([100])])
    assert tokens(table) == (0, 0, 2), "the second block is in memory, and the first one on disk"


def test_blocks_of_the_store_are_reached_by_every_instance(table: PrefixTable) -> None:
    first, second = service("a"), service("b")
    table.add(first)
    table.add(second)
    table.apply(first, [stored(0, 1)])
    found = table.match(CONTEXT, KEYS, in_store=[CPU, CPU, DISK, "", CPU])
    assert found["a"].ranks == {0: RankMatch(gpu=2, cpu=4, disk=6)}
    assert found["b"].ranks == {0: RankMatch(gpu=0, cpu=4, disk=6)}
    assert found["b"].alone == {"gpu": 0, "cpu": 4, "disk": 0}


def test_ranks_of_an_instance_are_told_apart(table: PrefixTable) -> None:
    for rank in (1, 0):
        table.add(service(rank=rank))
    [zero] = [each for each in table.services if each.rank == 0]
    table.apply(zero, [stored(0, 3)])
    assert (tokens(table, rank=0), tokens(table, rank=1)) == ((6, 6, 6), (0, 0, 0))


def test_instances_of_other_contexts_are_not_named(table: PrefixTable) -> None:
    table.add(service("a"))
    table.add(service("b"))
    table.add(service("c", context=Context("default", "other", "", "", 2)))
    assert table.match(CONTEXT, KEYS).keys() == {"a", "b"}
    assert table.match(CONTEXT, KEYS, instance="b").keys() == {"b"}
    assert table.match(CONTEXT, KEYS, instance="c") == {}


def test_cleared_and_lost_blocks_are_forgotten(table: PrefixTable) -> None:
    own = service()
    table.add(own)
    table.apply(own, [stored(0, 2), BlocksRemoved([100, 555]), stored(0, 1), AllBlocksCleared()])
    assert tokens(table) == (0, 0, 0)
    table.apply(own, [stored(0, 2)])
    table.clear(own)
    assert tokens(table) == (0, 0, 0)


def test_service_is_registered_once(table: PrefixTable, monkeypatch: pytest.MonkeyPatch) -> None:
    assert table.add(service())
    assert not table.add(service())
    with pytest.raises(InvalidArgument, match="with other members"):
        table.add(Service(CONTEXT, "a", 0, "tcp://elsewhere:1", ""))
    monkeypatch.setattr(module, "MAX_SERVICES", 1)
    with pytest.raises(Full):
        table.add(service("b"))


def test_events_of_a_removed_service_are_ignored(table: PrefixTable) -> None:
    """Its thread may still be taking them when another one is registered under its name."""
    old, new = service(), service()
    table.add(old)
    assert table.remove(old.name) is old
    assert table.remove(old.name) is None
    table.add(new)
    table.apply(old, [stored(0, 2)])
    assert tokens(table) == (0, 0, 0)
    table.apply(new, [stored(0, 2)])
    table.clear(old)
    assert tokens(table) == (4, 4, 4)


def test_tokens_of_the_latest_blocks_are_remembered(table: PrefixTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN_TOKENS", 6)
    own = service()
    table.add(own)
    table.apply(own, [stored(0, 3), stored(0, 1), copied(0, 1, CPU)])
    assert table.tokens_of(KEYS[0]) == [0, 1]
    table.apply(own, [stored(3, 4)])
    assert [table.tokens_of(key) for key in KEYS[:4]] == [[0, 1], None, [4, 5], [6, 7]]
