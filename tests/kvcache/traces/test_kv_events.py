"""Promises of kv_events.py: the events of nodes give the prompts again, for any clients and any interleaving."""

import json
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kvcache.traces.event_file import READ, REMOVED, STORED, BlockEvent, EventWriter, LostEvents
from kvstore.kvcache.traces.kv_events import prompts, read_prompts
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.kvcache.traces.named import generate
from kvstore.protocol.errors import InvalidArgument, TraceError

Chain = tuple[str, ...]


def event(kind: str, names: str, *, parents: str | None = None, time_s: float = 0.0, node: str = "n0", tenant: str = "") -> BlockEvent:
    """A letter a block. `parents`: a letter each, "." for none; by default each block's is the letter before it, a's none."""
    if parents is None:
        parents = "".join(chr(ord(name) - 1) if name != "a" else "." for name in names)
    keys = [name.encode() for name in names]
    return BlockEvent(kind, time_s * 1000, node, tenant, keys, [p.replace(".", "").encode() for p in parents], [1] * len(keys))


def stored(names: str, *, parents: str | None = None, time_s: float = 0.0, tenant: str = "") -> BlockEvent:
    return event(STORED, names, parents=parents, time_s=time_s, tenant=tenant)


def read(names: str, *, parents: str | None = None, time_s: float = 0.0, tenant: str = "") -> BlockEvent:
    return event(READ, names, parents=parents, time_s=time_s, tenant=tenant)


def chains(events: Sequence[BlockEvent | LostEvents], *, join_s: float = 60.0) -> list[str]:
    """The prompts as texts. Ids are given by first sight, so the letters come back in that order."""
    letters: list[str] = []
    for one in events:
        if isinstance(one, BlockEvent) and one.kind != REMOVED:
            letters += [key.decode() for key in one.keys] + [parent.decode() for parent in one.parents if parent]
    found = list(prompts(events, join_s=join_s))
    seen = dict(enumerate(dict.fromkeys(letters)))  # a batch's own blocks are seen before their parents
    return ["".join(seen[block] for block in request.hash_ids) for request in found]


def test_read_prefix_and_stored_rest_are_one_prompt() -> None:
    events = [read("ab", time_s=1), stored("cd", time_s=2), stored("e", time_s=3)]
    assert list(prompts(events, block_tokens=16)) == [TraceRequest(0.0, 5 * 16, 0, (0, 1, 2, 3, 4))]


def test_lengths_are_whole_blocks_and_times_relative() -> None:
    found = list(prompts([LostEvents(5000, "n0", "", 3), stored("a", time_s=6), stored("ab", time_s=70)]))
    assert found == [TraceRequest(1000.0, 512, 0, (0,)), TraceRequest(65000.0, 1024, 0, (0, 1))]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([read("abc")], ["abc"]),
        ([stored("ab"), read("ab")], ["ab", "ab"]),
        ([stored("ab"), read("ab"), stored("c")], ["ab", "abc"]),
        ([read("abd"), stored("ce")], ["abcde"]),
        ([read("d"), stored("abce")], ["abcde"]),
        ([read("cd"), read("ab")], ["abcd"]),
        ([read("ag"), stored("bcdefh")], ["abcdefgh"]),
        ([read("ad"), stored("bc")], ["abcd"]),
        ([read("ace"), read("bd"), stored("f")], ["abcdef"]),
        ([stored("ab"), event(REMOVED, "a"), read("b"), stored("a")], ["ab", "ab"]),
        ([read("ba")], ["ab"]),
        ([stored("abc"), read("ca")], ["abc", "abc"]),
        ([stored("aab")], ["ab"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else None,
)
def test_the_chain_decides_what_belongs_together(events: list[BlockEvent], expected: list[str]) -> None:
    assert sorted(chains(events)) == expected


def test_repeated_block_does_not_fill_another_prompts_hole() -> None:
    assert chains([stored("ac", parents=".b"), stored("ab")]) == ["abc", "ab"]


def test_prompt_without_a_hole_is_extended_first() -> None:
    events = [read("abc", time_s=1), read("ac", parents=".b", time_s=5), stored("d", time_s=6), stored("be", parents="ac", time_s=7)]
    assert chains(events) == ["abcd", "abce"]


def test_interleaved_prompts_are_kept_apart_by_their_chains() -> None:
    events = [read("a"), read("a"), stored("x", parents="a"), stored("b"), stored("c"), stored("y", parents="x")]
    assert sorted(chains(events)) == ["abc", "axy"]


def test_batch_with_several_chains_is_several_prompts() -> None:
    assert chains([stored("abxyz", parents=".a.xa")]) == ["ab", "xy", "az"]


def test_what_comes_later_than_the_join_time_is_another_prompt() -> None:
    events = [read("ab", time_s=0), stored("c", time_s=60), stored("d", time_s=121)]
    assert chains(events) == ["abc", "abcd"]
    assert chains(events, join_s=61) == ["abcd"]
    assert chains(events, join_s=0) == ["ab", "abc", "abcd"]


def test_read_joins_simultaneous_reads_but_no_stores() -> None:
    assert chains([read("ab"), read("cd", time_s=0.1)]) == ["abcd"]
    assert chains([read("ab"), read("cd", time_s=0.11)]) == ["ab", "abcd"]
    assert chains([stored("ab"), read("cd")]) == ["ab", "abcd"]


def test_prompt_with_the_hole_gets_the_block() -> None:
    assert chains([read("abd"), read("ab"), stored("c")]) == ["abcd", "ab"]


def test_prompts_are_in_order_of_their_first_events() -> None:
    events = [stored("a", time_s=0), stored("x", parents=".", time_s=1), stored("b", time_s=59), stored("c", time_s=118)]
    assert chains(events) == ["abc", "x"]


def test_equal_keys_of_two_tenants_are_two_blocks() -> None:
    found = list(prompts([stored("ab", tenant="red"), stored("ab", tenant="blue")]))
    assert [request.hash_ids for request in found] == [(0, 1), (2, 3)]


def test_without_parents_a_batch_is_a_chain_in_its_order() -> None:
    events = [stored("qkz", parents="..."), read("qk", parents=".."), read("qkz", parents="...")]
    assert chains(events) == ["qkz", "qk", "qkz"]


def test_parents_that_go_round_in_circles_end_nothing() -> None:
    assert chains([stored("xy", parents="yx"), stored("z", parents="x")]) == ["yxz"]


@pytest.mark.parametrize(("join_s", "block_tokens"), [(-1.0, 512), (float("nan"), 512), (60.0, 0)])
def test_a_time_or_a_size_that_is_none_is_refused(join_s: float, block_tokens: int) -> None:
    with pytest.raises(InvalidArgument, match="use at least 0 s and one token"):
        list(prompts([], join_s=join_s, block_tokens=block_tokens))


# --- random clients ---


@dataclass
class Cluster:
    """Nodes that lose blocks at random, and clients that read a prompt's cached prefix and store the rest, in any number of batches.

    Two clients never store the same block at the same time: its prompt would be ambiguous.
    """

    random: Random
    nodes: int
    where: dict[Chain, str] = field(default_factory=dict)
    events: list[BlockEvent] = field(default_factory=list)
    now_ms: float = 0.0

    def see(self, kind: str, blocks: Sequence[Chain], *, node: str) -> None:
        keys = [repr(block).encode() for block in blocks]
        parents = [repr(block[:-1]).encode() if len(block) > 1 else b"" for block in blocks]
        self.events.append(BlockEvent(kind, self.now_ms, node, "", keys, parents, [1] * len(keys)))

    def lose(self, share: float) -> None:
        for block in [block for block in self.where if self.random.random() < share]:
            self.see(REMOVED, [block], node=self.where.pop(block))

    def client(self, prompt: Chain) -> Iterator[None]:
        """One prompt, a batch at a time."""
        blocks = [prompt[: end + 1] for end in range(len(prompt))]
        self.now_ms += 1000
        for node in self.random.sample(range(self.nodes), self.nodes):
            if hits := [block for block in blocks if self.where.get(block) == f"n{node}"]:
                self.see(READ, hits, node=f"n{node}")
        missing = [block for block in blocks if block not in self.where]
        yield
        while missing:
            size = self.random.randint(1, len(missing))
            writes_to = f"n{self.random.randrange(self.nodes)}"
            self.see(STORED, missing[:size], node=writes_to)
            self.where |= dict.fromkeys(missing[:size], writes_to)
            missing = missing[size:]
            yield


def interleave(cluster: Cluster, sent: Sequence[Chain], *, share_lost: float) -> None:
    """Several at a time, unless two would store the same block."""
    waiting = list(sent)
    under_way: dict[Iterator[None], set[Chain]] = {}
    while waiting or under_way:
        if waiting and (not under_way or cluster.random.random() < 0.5):
            new = {waiting[0][: end + 1] for end in range(len(waiting[0]))} - cluster.where.keys()
            if all(new.isdisjoint(others) for others in under_way.values()):
                client = cluster.client(waiting.pop(0))
                next(client)
                under_way[client] = new
                continue
        client = cluster.random.choice(list(under_way))
        cluster.now_ms += 1000
        if next(client, "over") == "over":
            del under_way[client]
        cluster.lose(share_lost)


@given(
    st.lists(st.text("ab", min_size=1, max_size=6).map(tuple), max_size=12),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.05, 0.4]),
    st.integers(0, 1 << 30),
)
@settings(max_examples=300)
def test_the_prompts_of_interleaved_clients_come_back(sent: list[Chain], nodes: int, share_lost: float, seed: int) -> None:
    cluster = Cluster(Random(seed), nodes)
    interleave(cluster, sent, share_lost=share_lost)
    found = [request.hash_ids for request in prompts(cluster.events, join_s=1e6)]
    assert Counter(named(cluster.events, found)) == Counter(sent)


def named(events: Sequence[BlockEvent], found: Sequence[tuple[int, ...]]) -> list[Chain]:
    """The prompts that the ids stand for. A chain's own name is in its key."""
    keys: dict[bytes, None] = {}
    for one in events:
        if one.kind != REMOVED:
            keys |= dict.fromkeys(one.keys)
            keys |= dict.fromkeys(parent for parent in one.parents if parent)
    names = [literal_eval(key.decode()) for key in keys]
    result = []
    for ids in found:
        assert [names[block] for block in ids] == [names[ids[-1]][: end + 1] for end in range(len(ids))]
        result.append(names[ids[-1]])
    return result


def test_generated_conversations_come_back_in_their_order() -> None:
    """One client after the other, through a cache that forgets: the same prompts, one by one."""
    cluster = Cluster(Random(3), 2)
    sent = [tuple(map(str, request.hash_ids[:40])) for request in islice(generate(seed=5), 150)]
    for prompt in sent:
        for _ in cluster.client(prompt):
            cluster.lose(0.02)
    assert named(cluster.events, [request.hash_ids for request in prompts(cluster.events)]) == sent


# --- files ---


def test_recording_of_several_nodes_is_sorted_by_time(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "file") as writer:
        writer.write([stored("c", time_s=3), LostEvents(3500, "n0", "", 7), event(REMOVED, "a", time_s=4)])
        writer.write([event(READ, "ab", time_s=2, node="n1")])
    assert list(read_prompts(tmp_path / "file", block_tokens=2)) == [TraceRequest(0.0, 6, 0, (0, 1, 2))]


def test_a_trace_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 27, "input_length": 600, "output_length": 9, "hash_ids": [4, 7]}) + "\n")
    assert list(read_prompts(path)) == [TraceRequest(27, 600, 9, (4, 7))]


def test_what_is_neither_is_refused_as_a_trace_would_be(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    with pytest.raises(TraceError, match="line 1: no timestamp"):
        list(read_prompts(path))
