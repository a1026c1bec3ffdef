"""Arguments of the wrong type, through every public call: the answer is a typed error or a right result, never another exception."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client.aio import AsyncClient
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.sync import Client
from kvstore.client.tensors.cache import TensorCache
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.retention import Retention
from tests.system.running import running_system

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
KEYS = [b"first", b"second"]
VALUES = [b"1", b"22"]

UNORDERED: dict[str, Callable[[], Any]] = {
    "set": lambda: set(KEYS),
    "frozenset": lambda: frozenset(KEYS),
    "dict": lambda: dict.fromkeys(KEYS, b"1"),
    "dict_keys": lambda: dict.fromkeys(KEYS, b"1").keys(),
    "generator": lambda: (key for key in KEYS),
    "map": lambda: map(bytes, KEYS),
}
"""Arguments without an order or a length, which would pair keys with other keys' values."""

WRONG: dict[str, Callable[[], Any]] = UNORDERED | {
    "None": lambda: None,
    "int": lambda: 7,
    "str": lambda: "text",
    "bytes": lambda: b"by",
    "object": object,
    "ints": lambda: [1, 2],
    "nested": lambda: [[b"a"], [b"b"]],
    "float": lambda: 2.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "huge": lambda: 10**400,
    "complex": lambda: 1j,
    "bool": lambda: True,
    "array": lambda: np.arange(2),
    "objects": lambda: np.array([[object()], [object()]]),
    "strided": lambda: [np.zeros((4, 4))[:, ::2]] * 2,
    "scalar_tensor": lambda: torch.tensor(1),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse_rows": lambda: [torch.eye(4).to_sparse()] * 2,
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: [torch.empty(4, device="meta")] * 2,
    "class": lambda: bytes,
}

SAMPLES: dict[str, Any] = {
    "key": b"first",
    "keys": KEYS,
    "value": b"1",
    "values": VALUES,
    "parents": [None, b"first"],
    "offsets": [0, 0],
    "namespace": "",
    "request": "r",
    "first_block": 0,
    "retention": Retention(),
    "session": "chat",
}
"""Right values of arguments without a default."""

SPEC = CacheSpec(layers=2, kv_heads=1, head_dim=8, heads=1, dtype="float32", block_tokens=4)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with running_system(tmp_path_factory.mktemp("wrong"), "--dram 16MiB") as system:
        with system.client() as made:
            yield made
            made.remove(KEYS)
            assert made.put_batch(KEYS, VALUES) == [True, True], "it all left the system as it was"
            assert made.get_batch(KEYS) == VALUES


def sample(name: str) -> Any:
    if name in ("buffers", "out", "tensor"):
        return [bytearray(8), bytearray(8)] if name == "buffers" else torch.zeros(2, 2, 2, 1, 4, 8)
    return bytearray(8) if name == "buffer" else [1] * 8 if name == "token_ids" else [] if name == "prompts" else SAMPLES[name]


def calls(owner: Any) -> Iterator[tuple[str, Callable[..., Any], str, dict[str, Any]]]:
    """Each argument of each public call of `owner`, with right values of the others."""
    for name, function in inspect.getmembers(owner, callable):
        if name.startswith("_") or name in ("close", "tracing"):
            continue
        parameters = inspect.signature(function).parameters
        for wrong in parameters:
            if wrong in ("on_done", "request"):  # the caller's own, of any type
                continue
            others = {other: sample(other) for other, told in parameters.items() if told.default is told.empty and other != wrong}
            yield name, function, wrong, others


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its exception."""
    try:
        result = call()
        return result.__enter__() if hasattr(result, "__enter__") else result
    except Exception as error:
        return error


def surprises(owner: Any) -> list[str]:
    """Calls that end with an exception of no type of ours."""
    found = []
    for name, function, wrong, others in calls(owner):
        for kind, make in WRONG.items():
            result = outcome(lambda: function(**others, **{wrong: make()}))  # noqa: B023
            if isinstance(result, Exception) and not isinstance(result, KVStoreError):
                found.append(f"{name}({wrong}={kind}): {type(result).__name__}: {result}")
    return found


def test_a_clients_calls(client: Client) -> None:
    assert not surprises(client)


async def async_surprises(owner: Any) -> list[str]:
    """As `surprises`, of a client for asyncio."""
    found = []
    for name, function, wrong, others in calls(owner):
        for kind, make in WRONG.items():
            try:
                result = function(**others, **{wrong: make()})
                if inspect.isawaitable(result):
                    await result
                elif hasattr(result, "__aenter__"):
                    await result.__aenter__()
            except KVStoreError:
                pass
            except Exception as error:
                found.append(f"{name}({wrong}={kind}): {type(error).__name__}: {error}")
    return found


def test_an_async_clients_calls(client: Client) -> None:
    async def walk() -> list[str]:
        async with AsyncClient(client.settings.master, deadline_s=5.0) as aio:
            return await async_surprises(aio)

    assert not asyncio.run(walk())


def test_jobs_calls(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with Jobs(client) as jobs:
        assert not surprises(jobs)
    assert "a job of a client failed" not in caplog.text, "what fails in a worker is typed as well"


def test_a_tensor_caches_calls(client: Client) -> None:
    cache = TensorCache(client, SPEC, Namespace(model="m", revision="r", dtype="float32", block_tokens=4))
    assert not surprises(cache)


@pytest.mark.parametrize("wrong", ["master", "tenant", "token", "deadline_s", "settings", "transfer", "tracing"])
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_what_makes_a_client(make: type[Any], wrong: str, client: Client) -> None:
    found = []
    for kind, value in WRONG.items():
        result = outcome(lambda: make(**{"master": client.settings.master} | {wrong: value()}))  # noqa: B023
        if isinstance(result, Exception) and not isinstance(result, KVStoreError):
            found.append(f"{kind}: {type(result).__name__}: {result}")
    assert not found


@pytest.mark.parametrize("kind", UNORDERED)
def test_keys_and_values_without_an_order_are_refused(client: Client, kind: str) -> None:
    others: dict[str, Any] = {
        "put_batch": [VALUES],
        "put_batch_from": [VALUES],
        "replace": [VALUES],
        "get_batch_into": [[bytearray(8)] * 2],
    }
    for name in ("get_batch", "exists_batch", "exists_here", "match_prefix", "locate", "remove", "pin", "unpin", *others):
        with pytest.raises(InvalidArgument, match="keys is a list or another sequence"):
            getattr(client, name)(UNORDERED[kind](), *others.get(name, []))
    for name in ("put_batch", "put_batch_from", "replace"):
        with pytest.raises(InvalidArgument, match="values is a list or another sequence"):
            getattr(client, name)(KEYS, UNORDERED[kind]())


def test_a_ring_of_parents_is_refused(client: Client) -> None:
    keys = [b"%d" % number for number in range(8)]
    for parents in ([keys[i - 1] for i in range(8)], [keys[0], *[None] * 7], [keys[2], keys[0], keys[1], *keys[2:7]]):
        with pytest.raises(InvalidArgument, match="own ancestor"):
            client.put_batch(keys, [b"1"] * 8, parents=parents)
        with pytest.raises(InvalidArgument, match="own ancestor"):
            client.put_batch_from(keys, [b"1"] * 8, parents=parents)
    assert not any(client.exists_batch(keys))
    assert client.put_batch(keys, [b"1"] * 8, parents=[b"elsewhere", *keys[:-1]]) == [True] * 8
    backwards = list(reversed(keys))
    assert client.put_batch(backwards, [b"1"] * 8, parents=[*backwards[1:], None]) == [False] * 8


def test_rings_over_several_batches_are_evicted(client: Client) -> None:
    """Of 16 MiB, 4 MiB hold rings that no batch shows; prompts that are read three times over the rest replace them."""
    value = bytes(64 << 10)
    rings = [[b"ring-%d-%d" % (ring, place) for place in range(8)] for ring in range(8)]
    for keys in rings:
        for place, key in enumerate(keys):
            assert client.put(key, value, parent=keys[place - 1])
    for number in range(80):
        keys = [b"prompt-%d-%d" % (number, place) for place in range(16)]
        client.put_batch(keys, [value] * 16, parents=[None, *keys[:-1]])
        client.get_batch(keys)
        client.get_batch(keys)
    assert sum(client.exists_batch(list(chain(*rings)))) == 0
    assert all(client.exists_batch(keys))
