"""disaggregation/llama.py: the parts of a sharded model are really parts, and together they are the model."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from disaggregation.llama import Cache, LlamaPart, Part, Sum, Tensor, configuration, exact, seeded, whole  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.utils import logging  # noqa: E402

pytestmark = pytest.mark.slow

CONFIG = configuration()
PROMPT = torch.arange(7, 57) * 13 % 256
NEXT = torch.tensor([101])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.disable_progress_bar()
    place = tmp_path_factory.mktemp("llama")
    seeded(CONFIG, seed=3).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    """Logits of the prompt and of one more token, by the model as `transformers` runs it."""
    model, cache = whole(folder), DynamicCache(config=CONFIG)
    with torch.inference_mode():
        return torch.cat([model(tokens[None], cache=cache).logits[0] for tokens in (PROMPT, NEXT)])


class Group:
    """Ranks that are threads: each brings what it has, and all get the sum, added up in the order of ranks."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._brought: list[Tensor] = [None] * ranks

    def sum_of(self, rank: int) -> Sum:
        def add(values: Tensor) -> Tensor:
            self._brought[rank] = values
            self._barrier.wait()
            total = torch.stack(self._brought).sum(0) if len(self._brought) > 1 else values
            self._barrier.wait()
            return total

        return add


def run_sharded(folder: Path, tp: int, splits: list[range], chunks: list[Tensor]) -> Tensor:
    """Logits [tokens, vocabulary] of a sequence given chunk by chunk to `tp` ranks in each of the stages that `splits` says."""
    stages = []
    for layers in splits:
        group = Group(tp)
        parts = [LlamaPart(folder, Part(layers=layers, tp=tp, tp_rank=rank), group.sum_of(rank)) for rank in range(tp)]
        stages.append([(part, DynamicCache(config=CONFIG)) for part in parts])
    found, first_token = [], 0
    with ThreadPoolExecutor(tp) as threads:

        def run(part: LlamaPart, cache: Cache, values: Tensor) -> Tensor:
            return part(values, cache, first_token=first_token)

        for chunk in chunks:
            values = [chunk] * tp
            for ranks in stages:
                values = list(threads.map(run, *zip(*ranks, strict=True), values))
            assert all(torch.equal(values[0], other) for other in values), "ranks that got the same sums have the same result"
            found.append(values[0])
            first_token += len(chunk)
    return torch.cat(found)


@pytest.mark.parametrize("splits", [[range(4)], [range(2), range(2, 4)], [range(3), range(3, 4)]])
def test_stages_that_split_no_sum_are_the_model_to_the_bit(folder: Path, expected: Tensor, splits: list[range]) -> None:
    assert torch.equal(run_sharded(folder, 1, splits, [PROMPT, NEXT]), expected)


@pytest.mark.parametrize(("tp", "splits"), [(2, [range(4)]), (2, [range(2), range(2, 4)]), (4, [range(4)]), (8, [range(1), range(1, 4)])])
def test_tensor_parallel_ranks_are_the_model_to_rounding(folder: Path, expected: Tensor, tp: int, splits: list[range]) -> None:
    found = run_sharded(folder, tp, splits, [PROMPT, NEXT])
    truth = exact(folder)(torch.cat([PROMPT, NEXT])[None]).logits[0]
    assert truth.dtype == torch.float64
    assert (found - truth).abs().max() <= 4 * (expected - truth).abs().max() < 1e-4


def test_stages_are_bit_equal_to_a_tensor_parallel_group(folder: Path) -> None:
    one_stage = run_sharded(folder, 2, [range(4)], [PROMPT, NEXT])
    assert torch.equal(run_sharded(folder, 2, [range(2), range(2, 4)], [PROMPT, NEXT]), one_stage)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_holds_its_slices_and_nothing_else(folder: Path, tp: int) -> None:
    full = whole(folder).state_dict()
    parts = [LlamaPart(folder, Part(layers=range(1, 3), tp=tp, tp_rank=rank), lambda values: values).state_dict() for rank in range(tp)]
    joined = {"q_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
    for name in parts[0]:
        matrix, pieces = name.split(".")[-2], [part[name] for part in parts]
        if matrix in joined:
            assert torch.equal(torch.cat(pieces, joined[matrix]), full[f"model.{name}"])
        elif matrix in ("k_proj", "v_proj"):
            kept = pieces[:: max(1, tp // CONFIG.num_key_value_heads)]
            assert torch.equal(torch.cat(kept), full[f"model.{name}"])
        else:
            assert all(torch.equal(piece, full[f"model.{name}"]) for piece in pieces)
    assert {name.split(".")[1] for name in parts[0]} == {"1", "2"}, "neither other layers, nor the embedding, nor the head"
    attention = sum(piece.numel() for name, piece in parts[0].items() if "q_proj" in name or "o_proj" in name)
    assert attention * tp == 2 * 2 * CONFIG.num_attention_heads * CONFIG.head_dim * CONFIG.hidden_size


def test_it_tells_each_layer_once_it_is_in_the_cache(folder: Path) -> None:
    part, cache = LlamaPart(folder, Part(layers=range(2)), lambda values: values), DynamicCache(config=CONFIG)
    told: list[tuple[int, int]] = []
    part(PROMPT, cache, first_token=0, on_layer=lambda layer: told.append((layer, cache.get_seq_length(layer))))
    assert told == [(0, len(PROMPT)), (1, len(PROMPT))]
