"""Blocks of pools in any memory order go into values and come out of them again, byte for byte."""

import pytest
import torch

from kvstore.engines.vllm.layout import LayerPools
from kvstore.protocol.errors import ConfigError

BLOCKS, HEADS, TOKENS, ELEMENTS, LAYERS = 7, 2, 4, 6, 3
TABLE = [5, 0, 3]


def pools(order: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Layers seen as [B, H, N, C], as vLLM has them in one piece of memory of the order of `order`."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": ELEMENTS}
    count = LAYERS * BLOCKS * HEADS * TOKENS * ELEMENTS
    memory = torch.arange(count, dtype=torch.int32).to(dtype).view([sizes[axis] for axis in order])
    return list(memory.permute([order.index(axis) for axis in "LBHNC"]))


@pytest.mark.parametrize("copies_on_device", [False, True])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_blocks_move_between_pools(order: str, copies_on_device: bool) -> None:
    layers = pools(order)
    source = LayerPools(layers, BLOCKS, copies_on_device=copies_on_device)
    values = torch.zeros(len(TABLE), source.value_bytes, dtype=torch.uint8)
    source.gather(TABLE, values)
    empty = [torch.zeros_like(layer, memory_format=torch.preserve_format) for layer in layers]
    target = LayerPools(empty, BLOCKS, copies_on_device=copies_on_device)
    target.scatter(values, [1, 2, 6])
    for layer, copy in zip(layers, empty, strict=True):
        assert torch.equal(copy[[1, 2, 6]], layer[TABLE])
        assert not copy[[0, 3, 4, 5]].any(), "blocks of others are left alone"


def test_a_value_is_its_layers_one_after_another_in_their_own_order() -> None:
    layers = pools("LBNHC")
    source = LayerPools(layers, BLOCKS)
    assert source.value_bytes == LAYERS * HEADS * TOKENS * ELEMENTS * 4
    values = torch.zeros(1, source.value_bytes, dtype=torch.uint8)
    source.gather([4], values)
    expected = torch.cat([layer[4].transpose(0, 1).flatten() for layer in layers])
    assert torch.equal(values[0].view(torch.float32), expected)


def test_layers_of_many_kinds_are_one_value() -> None:
    kinds = [*pools("LBHNC"), torch.arange(BLOCKS * 3, dtype=torch.uint8).view(BLOCKS, 3), *pools("BLHNC", torch.bfloat16)]
    source = LayerPools(kinds, BLOCKS)
    values = torch.zeros(len(TABLE), source.value_bytes, dtype=torch.uint8)
    source.gather(TABLE, values)
    copies = [torch.zeros_like(layer) for layer in kinds]
    LayerPools(copies, BLOCKS).scatter(values, TABLE)
    for layer, copy in zip(kinds, copies, strict=True):
        assert torch.equal(copy[TABLE], layer[TABLE])


def test_smaller_blocks_that_belong_together_are_one() -> None:
    (layer, *_) = pools("LBHNC")
    small = layer.reshape(BLOCKS * 2, HEADS // 2, TOKENS, ELEMENTS)
    values = torch.zeros(2, LayerPools([layer], BLOCKS).value_bytes, dtype=torch.uint8)
    LayerPools([small], BLOCKS).gather([6, 1], values)
    assert torch.equal(values.view(torch.float32).view(2, HEADS, TOKENS, ELEMENTS), layer[[6, 1]])


def test_the_form_tells_what_blocks_must_have_in_common() -> None:
    forms = {order: LayerPools.form(pools(order)[0], BLOCKS) for order in ("LBHNC", "BLHNC", "LBNHC")}
    assert forms["LBHNC"] == forms["BLHNC"] == f"torch.float32 {[HEADS, TOKENS, ELEMENTS]} of [0, 1, 2]"
    assert forms["LBNHC"] != forms["LBHNC"], "tokens before heads"
    assert LayerPools.form(pools("LBHNC", torch.bfloat16)[0], BLOCKS) != forms["LBHNC"]


def test_the_form_tells_orders_of_axes_of_equal_size_apart() -> None:
    heads_first = torch.zeros(BLOCKS, 4, 4, 8)  # blocks, heads, tokens, elements
    tokens_first = torch.zeros(BLOCKS, 4, 4, 8).transpose(1, 2)
    assert LayerPools.form(heads_first, BLOCKS) != LayerPools.form(tokens_first, BLOCKS)


def test_blocks_are_there_once_the_device_that_they_are_copied_to_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that loads has not chosen the device of its rank. The device without memory stands for any that is no CPU."""
    waited: list[object] = []
    monkeypatch.setattr("torch.accelerator.synchronize", lambda *device: waited.append(device))
    layers = [torch.empty(BLOCKS, 4, 8, device="meta") for _ in range(LAYERS)]
    target = LayerPools(layers, BLOCKS)
    target.scatter(torch.zeros(len(TABLE), target.value_bytes, dtype=torch.uint8), TABLE)
    assert waited == [(layers[0].device,)]


def test_blocks_of_large_pieces_are_filled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = pools("BLNHC")
    piece_bytes = HEADS * TOKENS * ELEMENTS * 4
    monkeypatch.setattr("kvstore.engines.vllm.layout.MIN_PIECE_BYTES", piece_bytes + 1)
    assert LayerPools(layers, BLOCKS).pieces(TABLE) is None
    assert LayerPools(layers, BLOCKS).layer_count == 0
    monkeypatch.setattr("kvstore.engines.vllm.layout.MIN_PIECE_BYTES", piece_bytes)
    source = LayerPools(layers, BLOCKS)
    values = torch.zeros(len(TABLE), source.value_bytes, dtype=torch.uint8)
    source.gather(TABLE, values)
    pieces = source.pieces(TABLE)
    assert pieces is not None
    assert [b"".join(piece.tobytes() for piece in block) for block in pieces] == [value.numpy().tobytes() for value in values]
    for layer in range(source.layer_count):
        offset, of_layer = source.layer_pieces(layer, TABLE)
        ends = [offset + piece.nbytes for piece in of_layer]
        assert [piece.tobytes() for piece in of_layer] == [
            value.numpy().tobytes()[offset:end] for value, end in zip(values, ends, strict=True)
        ]
    assert source.layer_count == len(layers)
    assert offset + of_layer[0].nbytes == source.value_bytes
    pieces[0][1][:] = 0
    assert not layers[1][TABLE[0]].any()
    assert layers[0][TABLE[0]].any()


def test_blocks_that_are_no_bytes_in_a_row_are_not_filled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engines.vllm.layout.MIN_PIECE_BYTES", 1)
    assert LayerPools(pools("LHBNC"), BLOCKS).pieces(TABLE) is None
    assert LayerPools(pools("LBHNC"), BLOCKS, copies_on_device=True).pieces(TABLE) is None


def test_what_is_no_pool_of_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        LayerPools([], BLOCKS)
    with pytest.raises(ConfigError, match="not made of 7 blocks"):
        LayerPools([torch.zeros(8, 2)], BLOCKS)
    with pytest.raises(ConfigError, match="side by side"):
        LayerPools([torch.zeros(BLOCKS, 4)[:, ::2]], BLOCKS)


if torch.cuda.is_available():

    @pytest.mark.gpu
    def test_blocks_move_between_gpu_and_host() -> None:
        layers = [layer.cuda() for layer in pools("BLHNC")]
        source = LayerPools(layers, BLOCKS)
        values = torch.zeros(len(TABLE), source.value_bytes, dtype=torch.uint8)
        source.gather(TABLE, values)
        copies = [torch.zeros_like(layer) for layer in layers]
        LayerPools(copies, BLOCKS).scatter(values, TABLE)
        for layer, copy in zip(layers, copies, strict=True):
            assert torch.equal(copy[TABLE].cpu(), layer[TABLE].cpu())
