"""Loads layer by layer: who waits for which layer, and what is loaded when."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kvstore.client import Client
from kvstore.engines.vllm.by_layer import Reached, fetch_by_layer
from kvstore.engines.vllm.layout import LayerPools

BLOCKS = 4
LAYERS = 5
ELEMENTS = 16
LATER_S = 600


class Waiting(threading.Thread):
    """Waits for a layer, or for all."""

    def __init__(self, reached: Reached, layer: int | None) -> None:
        super().__init__(daemon=True)
        self._wait = reached.wait_all if layer is None else lambda: reached.wait_layer(layer)
        self.start()

    def run(self) -> None:
        self._wait()

    def ends(self) -> None:
        self.join(60)
        assert not self.is_alive()


def test_nobody_waits_for_what_has_not_begun() -> None:
    reached = Reached()
    reached.wait_layer(0)
    reached.wait_all()


def test_a_layer_is_waited_for_until_all_loads_have_it() -> None:
    reached = Reached()
    reached.begin("a")
    reached.begin("b")
    reached.reach("a", 2)
    first, second = Waiting(reached, 0), Waiting(reached, 1)
    assert first.is_alive(), "of b nothing is there"
    reached.reach("b", 1)
    first.ends()
    reached.wait_layer(0)
    assert second.is_alive()
    reached.end("b")
    second.ends()
    last = Waiting(reached, None)
    assert last.is_alive()
    reached.end("a")
    last.ends()


@pytest.fixture
def client(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr("kvstore.engines.vllm.layout.MIN_PIECE_BYTES", 1)
    with Client(address) as client:
        yield client


def pools() -> tuple[list[torch.Tensor], LayerPools]:
    layers = [torch.zeros(BLOCKS, ELEMENTS) for _ in range(LAYERS)]
    return layers, LayerPools(layers, BLOCKS)


def value(block: int, layers: int = LAYERS) -> bytes:
    """Of a block whose layers are full of numbers that differ."""
    return b"".join(torch.full([ELEMENTS], 10.0 * block + layer).numpy().tobytes() for layer in range(layers))


def test_the_first_layer_of_all_blocks_comes_first_then_as_many_as_are_there(client: Client) -> None:
    keys = [b"by layer %d" % block for block in (1, 2)]
    client.put_batch(keys, [value(1), value(2)], ack="cluster")
    layers, made = pools()
    seen: list[tuple[int, list[list[float]]]] = []
    count = fetch_by_layer(
        client,
        keys,
        made,
        [3, 0],
        time.monotonic() + LATER_S,
        lambda layers_there: seen.append((layers_there, [layer[[3, 0], 0].tolist() for layer in layers])),
    )
    assert count == 2
    come = [[10.0 + layer, 20.0 + layer] for layer in range(LAYERS)]
    assert seen == [(there, come[:there] + [[0, 0]] * (LAYERS - there)) for there in (1, 2, 4, 5)]
    assert all(torch.equal(layer[3], layer[3, 0].expand(ELEMENTS)) for layer in layers)


def test_a_block_that_vanishes_between_two_layers_ends_the_prefix_there(client: Client) -> None:
    keys = [b"vanishing %d" % block for block in (1, 2, 3)]
    client.put_batch(keys, [value(1), value(2), value(3)], ack="cluster")
    layers, made = pools()

    def reach(layers_there: int) -> None:
        if layers_there == 1:
            client.remove([keys[1]], force=True)

    assert fetch_by_layer(client, keys, made, [0, 1, 2], time.monotonic() + LATER_S, reach) == 1
    assert [layer[0, 0].item() for layer in layers] == [10, 11, 12, 13, 14]


def test_a_value_that_is_too_short_is_no_block(client: Client) -> None:
    client.put_batch([b"whole", b"short"], [value(1), value(2, LAYERS - 1)], ack="cluster")
    _, made = pools()
    reached: list[int] = []
    assert fetch_by_layer(client, [b"whole", b"short"], made, [0, 1], time.monotonic() + LATER_S, reached.append) == 1
    assert reached == [1, 2, 4, 5], "the engine waits for each of them"


def test_what_is_late_is_no_block(client: Client) -> None:
    client.put_batch([b"late"], [value(1)], ack="cluster")
    layers, made = pools()
    reached: list[int] = []
    assert fetch_by_layer(client, [b"late"], made, [0], time.monotonic(), reached.append) == 0
    assert reached == [1, 2, 4, 5]
    assert not layers[0].any()
