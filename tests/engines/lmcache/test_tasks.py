"""Tasks of an L2 adapter on a real cluster: each ends, signals its descriptor, and is a miss if the store fails.

`Locks`: holds of the store to release when LMCache unlocks objects.
"""

import os
import select
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client.holds import new_hold
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.sync import Client
from kvstore.engines.lmcache.keys import ChunkKeys
from kvstore.engines.lmcache.settings import LMCacheSettings
from kvstore.engines.lmcache.tasks import Locks, Results, StoreResult, Tasks
from kvstore.testing.transfer.awaited import eventually
from tests.client.embedded import embedded
from tests.ports import free_ports

T = TypeVar("T")
WAIT_S = 60.0
"""For what is to come."""


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes
    cache_salt: str = ""
    model_name: str = "llama"
    kv_rank: int = 0
    object_group_id: int = 0


@dataclass
class Memory:
    byte_array: Any


def keys_named(*names: str, salt: str = "") -> list[Key]:
    return [Key(name.encode(), salt) for name in names]


def memory(*values: bytes) -> list[Memory]:
    return [Memory(bytearray(value)) for value in values]


class Scene:
    """Tasks on one cluster, and what their listeners heard."""

    def __init__(self, address: str, **settings: Any) -> None:
        self.client = Client(address)
        self.jobs = Jobs(self.client, JobSettings(**settings))
        self.stored: list[tuple[Key, int]] = []
        self.loaded: list[Key] = []
        self.tasks: Tasks[Key] = Tasks(
            self.client,
            self.jobs,
            ChunkKeys(LMCacheSettings(dtype="float32")),
            on_stored=lambda keys, sizes: self.stored.extend(zip(keys, sizes, strict=True)),
            on_loaded=self.loaded.extend,
        )

    def store(self, keys: list[Key], objects: list[Memory]) -> StoreResult:
        return ended(self.tasks.stores, self.tasks.store(keys, objects))

    def look_up(self, keys: list[Key]) -> list[bool]:
        return ended(self.tasks.lookups, self.tasks.look_up(keys))

    def load(self, keys: list[Key], objects: list[Memory]) -> list[bool]:
        return ended(self.tasks.loads, self.tasks.load(keys, objects))

    def close(self) -> None:
        self.jobs.close()
        self.tasks.close()
        self.client.close()


def ended(results: Results[T], task: int) -> T:
    """Wait for the descriptor as LMCache does; the task's result."""
    poll = select.poll()
    poll.register(results.event_fd, select.POLLIN)
    assert poll.poll(WAIT_S * 1000), "the descriptor has not told of the task"
    os.eventfd_read(results.event_fd)
    result = results.take(task)
    assert result is not None
    assert results.take(task) is None
    return result


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with embedded(ClusterPlan(dram="64MiB", is_private=True)) as running:
        yield running


@pytest.fixture
def scene(cluster: LocalCluster) -> Iterator[Scene]:
    scene = Scene(cluster.address)
    yield scene
    scene.close()


@pytest.fixture
def lost() -> Iterator[Scene]:
    """Nothing listens where its master should be."""
    scene = Scene(f"127.0.0.1:{free_ports(1)[0]}", lookup_deadline_s=30.0)
    yield scene
    scene.close()


def test_what_a_lookup_found_is_held_until_all_of_it_is_unlocked(scene: Scene) -> None:
    keys = keys_named("held", "too")
    scene.store(keys, memory(b"1", b"2"))
    scene.client.flush()
    assert scene.look_up([*keys, *keys_named("nowhere")]) == [True, True, False]
    assert scene.look_up(keys[:1]) == [True]
    names = scene.tasks._names(keys)
    assert scene.client.remove(names) == 0
    scene.tasks.unlock(keys)
    assert scene.tasks.remove(keys[:1], deadline_s=60) == {}, "another lookup has it"
    scene.tasks.unlock(keys_named("held", "nowhere"))
    eventually(lambda: scene.client.remove(names) == 2, "the node to know that the holds are over")
    assert scene.look_up(keys_named("nowhere")) == [False]


def test_what_was_stored_is_found_and_loaded(scene: Scene) -> None:
    keys = keys_named("a", "b", "c")
    assert scene.look_up(keys) == [False, False, False]
    assert scene.store(keys[:2], memory(b"first" * 1000, b"second" * 1000)) == StoreResult(True, 11_000)
    assert scene.look_up(keys) == [True, True, False]
    into = memory(bytes(5000), bytes(6000), bytes(10))
    assert scene.load(keys, into) == [True, True, False]
    assert [bytes(each.byte_array) for each in into[:2]] == [b"first" * 1000, b"second" * 1000]
    assert scene.stored == [(keys[0], 5000), (keys[1], 6000)]
    assert scene.loaded == keys[:2]


def test_an_object_that_the_store_has_is_not_new(scene: Scene) -> None:
    keys = keys_named("old", "new")
    scene.store(keys[:1], memory(b"1" * 100))
    assert scene.store(keys, memory(b"1" * 100, b"2" * 200)) == StoreResult(True, 200)
    assert scene.stored == [(keys[0], 100), (keys[1], 200)]


def test_objects_of_several_users_in_one_task_are_stored_apart(scene: Scene) -> None:
    keys = keys_named("x", salt="ann") + keys_named("x", salt="bob")
    assert scene.store(keys, memory(b"ann" * 10, b"bob" * 20)) == StoreResult(True, 90)
    into = memory(bytes(30), bytes(60))
    assert scene.load(keys, into) == [True, True]
    assert [bytes(each.byte_array[:3]) for each in into] == [b"ann", b"bob"]


def test_memory_of_another_size_than_the_value_is_a_miss(scene: Scene) -> None:
    keys = keys_named("size-1", "size-2", "size-3")
    scene.store(keys, memory(b"1" * 100, b"2" * 100, b"3" * 100))
    assert scene.load(keys, memory(bytes(99), bytes(100), bytes(101))) == [False, True, False]
    assert scene.loaded == keys[1:2]


def test_a_deleted_object_is_a_miss_and_says_what_it_held(scene: Scene) -> None:
    keys = keys_named("gone", "kept", "never")
    scene.store(keys[:2], memory(b"1" * 100, b"2" * 200))
    assert scene.tasks.remove([keys[0], keys[2]], deadline_s=WAIT_S) == {keys[0]: 100}
    assert scene.look_up(keys) == [False, True, False]


def test_a_task_of_nothing_ends(scene: Scene) -> None:
    assert scene.store([], []) == StoreResult(True, 0)
    assert scene.look_up([]) == []
    assert scene.load([], []) == []
    assert scene.tasks.remove([], deadline_s=WAIT_S) == {}
    assert not scene.stored


def test_each_task_has_a_number_and_a_result_of_its_own(scene: Scene) -> None:
    keys = keys_named(*(f"many-{index}" for index in range(20)))
    tasks = [scene.tasks.store([key], memory(b"v" * 10)) for key in keys]
    assert len(set(tasks)) == 20
    results: dict[int, StoreResult] = {}
    poll = select.poll()
    poll.register(scene.tasks.stores.event_fd, select.POLLIN)
    while len(results) < 20:
        assert poll.poll(WAIT_S * 1000)
        os.eventfd_read(scene.tasks.stores.event_fd)
        results |= scene.tasks.stores.take_all()
    assert results == dict.fromkeys(tasks, StoreResult(True, 10))


def test_the_three_descriptors_are_told_apart(scene: Scene) -> None:
    tasks = scene.tasks
    assert len({tasks.stores.event_fd, tasks.lookups.event_fd, tasks.loads.event_fd}) == 3
    scene.look_up(keys_named("a"))
    with pytest.raises(BlockingIOError):
        os.eventfd_read(tasks.stores.event_fd)


def test_an_unreachable_store_is_a_miss_of_every_task(lost: Scene) -> None:
    keys = keys_named("a", "b")
    assert lost.look_up(keys) == [False, False]
    assert lost.load(keys, memory(bytes(10), bytes(10))) == [False, False]
    assert lost.store(keys, memory(b"1", b"2")) == StoreResult(False, 0)
    assert lost.tasks.remove(keys, deadline_s=WAIT_S) == {}
    assert not lost.stored
    assert not lost.loaded


def test_arguments_that_make_no_sense_are_a_task_that_failed(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    nameless = [Key(b"a", model_name="")]
    assert scene.store(nameless, memory(b"1")) == StoreResult(False, 0)
    assert scene.look_up(nameless) == [False]
    assert scene.load(nameless, memory(b"1")) == [False]
    assert scene.store(keys_named("empty"), memory(b"")) == StoreResult(False, 0)
    assert scene.load(keys_named("no memory"), [Memory(None)]) == [False]
    assert scene.tasks.remove(nameless, deadline_s=WAIT_S) == {}
    assert "model" in caplog.text


def test_a_listener_that_fails_keeps_no_task_from_ending(cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("the listener's own trouble")

    with Client(cluster.address) as client, Jobs(client) as jobs:
        tasks: Tasks[Key] = Tasks(client, jobs, ChunkKeys(LMCacheSettings(dtype="float32")), on_stored=fail, on_loaded=fail)
        keys = keys_named("listened")
        assert ended(tasks.stores, tasks.store(keys, memory(b"12345"))) == StoreResult(True, 5)
        assert ended(tasks.loads, tasks.load(keys, memory(bytes(5)))) == [True]
        tasks.close()
    assert caplog.text.count("the listener's own trouble") >= 2


def test_what_does_not_fit_the_queue_is_a_store_that_failed(cluster: LocalCluster) -> None:
    scene = Scene(cluster.address, queue_bytes=1000)
    try:
        keys = keys_named("fits", "does not")
        assert scene.store(keys, memory(b"1" * 600, b"2" * 600)) == StoreResult(False, 600)
        assert scene.look_up(keys) == [True, False]
    finally:
        scene.close()


def test_once_closed_tasks_are_accepted_and_tell_nobody(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the close, the descriptor's number may belong to an unrelated file."""
    scene = Scene(cluster.address)
    scene.close()
    told: list[int] = []
    monkeypatch.setattr(os, "eventfd_write", lambda number, _value: told.append(number))
    assert {scene.tasks.store(keys_named("a"), memory(b"1")), scene.tasks.look_up(keys_named("a"))} == {1, 2}
    assert scene.tasks.remove(keys_named("a"), deadline_s=WAIT_S) == {}
    assert scene.tasks.stores.take_all() == {}
    assert told == []
    scene.tasks.close()


S = 10**9


def test_of_several_lookups_the_oldest_is_unlocked_first() -> None:
    locks, first, second = Locks(), new_hold(30), new_hold(30)
    locks.add(first, [b"a"], 0)
    locks.add(second, [b"a"], 0)
    assert locks.unlock([b"a"]) == [first]
    assert locks.unlock([b"a"]) == [second]
    locks.add(first, [b"a", b"b"], 0)
    locks.add(second, [b"a"], 0)
    assert locks.unlock([b"a", b"a", b"b"]) == [second, first]


def test_locks_whose_hold_is_over_are_forgotten() -> None:
    locks, over, later = Locks(), new_hold(1), new_hold(30)
    locks.add(over, [b"a", b"b"], 0)
    locks.add(later, [b"a"], 0)
    locks.add(new_hold(30), [b"c"], S)
    assert locks.unlock([b"b"]) == []
    assert locks.unlock([b"a"]) == [later]


def test_those_who_never_unlock_cost_no_memory_for_long() -> None:
    locks = Locks()
    for number in range(10_000):
        locks.add(new_hold(1), [b"%d" % number], number * S // 100)
    assert len(locks._of_name) == len(locks._lookups) == 100
