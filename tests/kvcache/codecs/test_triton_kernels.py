"""The fused kernels make and read the records of the torch codecs, to the bit: in Triton's interpreter, and on CUDA where it is."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from kvstore.kvcache.codecs import codec
from kvstore.kvcache.codecs.schemes import Scheme
from tests.devices import DEVICE, needs_cuda

SCHEMES = [Scheme(kind) for kind in ("fp8-tensor", "fp8-head", "int8", "int8a")]
SCHEMES += [Scheme("int4", 16), Scheme("int4", 64), Scheme("int2", 32)]


def is_triton(name: str) -> bool:
    """Its Python modules: the extension stays, for it can be loaded only once."""
    return name == "kvstore.kvcache.codecs.triton_kernels" or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """codec_triton on Triton's interpreter, which must be chosen before triton is imported; others of this process may have it already."""
    before = {name: module for name, module in sys.modules.items() if is_triton(name)}
    for name in before:
        del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.import_module("kvstore.kvcache.codecs.triton_kernels")
    # Aside, not away: Triton's extension complains at exit of what outlives its modules.
    for name in [name for name in sys.modules if is_triton(name)]:
        sys.modules[f"interpreted.{name}"] = sys.modules.pop(name)
    sys.modules.update(before)


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers of many magnitudes, with a constant row and a constant column."""
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(3).exp()
    values[..., 1, :] = 0.125
    values[..., :, 2] = 3.0
    return values.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num()))


def damaged(values: torch.Tensor) -> torch.Tensor:
    for place, number in (((0, 1, 3, 5), torch.nan), ((1, 0, 0, 0), torch.inf), ((1, 0, 2, 8), -torch.inf), ((0, 0, 1, 1), 1e30)):
        values[place] = number
    return values


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("is_key", [True, False])
def test_on_cuda_kernels_are_the_torch_codec_to_the_bit(scheme: Scheme, is_key: bool) -> None:
    """The first test, before the interpreter takes the place of the compiler."""
    for tokens, head_dim in ((64, 128), (64, 192), (128, 576)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            values = damaged(sample((8, 2, tokens, head_dim), dtype))
            expected = codec.encode(values, scheme, is_key=is_key)
            records = codec.encode(values.cuda(), scheme, is_key=is_key)
            assert torch.equal(records.cpu(), expected)
            plain = codec.decode(expected, scheme, is_key=is_key, tokens=tokens, head_dim=head_dim, dtype=dtype)
            decoded = codec.decode(records, scheme, is_key=is_key, tokens=tokens, head_dim=head_dim, dtype=dtype)
            assert same(decoded.cpu(), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [*SCHEMES[:4], Scheme("int4", 16)], ids=lambda scheme: scheme.name)
def test_shapes_without_kernels_are_equal_on_any_device(scheme: Scheme) -> None:
    """By torch: more tokens and channels than a tile has."""
    for is_key, tokens, head_dim in ((True, 272, 48), (False, 16, 1040)):
        values = damaged(sample((2, 2, tokens, head_dim)))
        expected = codec.encode(values, scheme, is_key=is_key)
        records = codec.encode(values.to(DEVICE), scheme, is_key=is_key)
        assert torch.equal(records.cpu(), expected)
        plain, decoded = (
            codec.decode(encoded, scheme, is_key=is_key, tokens=tokens, head_dim=head_dim, dtype=values.dtype)
            for encoded in (expected, records)
        )
        assert same(decoded.cpu(), plain)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaNs and infinities that the interpreter computes with
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize(("is_key", "tokens", "head_dim"), [(True, 64, 80), (False, 64, 192)])
def test_kernels_are_the_torch_codec_to_the_bit(kernels: ModuleType, scheme: Scheme, is_key: bool, tokens: int, head_dim: int) -> None:
    values = damaged(sample((2, 2, tokens, head_dim)))
    expected = codec.encode(values, scheme, is_key=is_key)
    records = torch.zeros_like(expected)
    assert kernels.serves(values, records, scheme, is_key=is_key)
    kernels.encode(values, scheme, is_key=is_key, out=records)
    assert torch.equal(records, expected)
    # Into float32: the interpreter cuts numbers to bfloat16 where CUDA rounds them.
    decoded = torch.empty(values.shape)
    kernels.decode(records, scheme, is_key=is_key, out=decoded)
    plain = codec.decode(records, scheme, is_key=is_key, tokens=tokens, head_dim=head_dim, dtype=torch.float32)
    assert same(decoded, plain)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_strides_of_either_side_are_those_given(kernels: ModuleType, scheme: Scheme) -> None:
    """As of one layer of a pool [blocks, tokens, heads, head_dim] and of values with a header each."""
    values = sample((2, 64, 2, 128), torch.float16)[:, :, :, :64].transpose(1, 2)
    expected = codec.encode(values, scheme, is_key=True)
    memory = torch.zeros((2, 2, expected.shape[-1] + 64), dtype=torch.uint8)
    records = memory[..., 64:]
    kernels.encode(values, scheme, is_key=True, out=records)
    assert torch.equal(records, expected)
    assert not memory[..., :64].any()
    decoded = torch.zeros((2, 64, 2, 64), dtype=torch.float16)
    kernels.decode(records, scheme, is_key=True, out=decoded.transpose(1, 2))
    plain = codec.decode(expected, scheme, is_key=True, tokens=64, head_dim=64, dtype=torch.float16)
    assert same(decoded.transpose(1, 2), plain)


@pytest.mark.parametrize(
    ("scheme", "is_key", "shape"),
    [
        (Scheme("int4", 16), True, (48, 64)),
        (Scheme("int4", 16), True, (512, 64)),
        (Scheme("int4", 16), False, (3, 64)),
        (Scheme("int8"), True, (16, 2048)),
        (Scheme("fp8-head"), True, (3, 7)),
    ],
)
def test_shapes_that_tiles_do_not_fit_are_left_to_torch(kernels: ModuleType, scheme: Scheme, is_key: bool, shape: tuple[int, int]) -> None:
    values = torch.zeros((1, *shape))
    assert not kernels.serves(values, codec.encode(values, scheme, is_key=is_key), scheme, is_key=is_key)


def test_records_that_are_not_aligned_are_left_to_torch(kernels: ModuleType) -> None:
    values = torch.zeros((1, 16, 64))
    memory = torch.empty(16 * 64 + 5, dtype=torch.uint8)
    assert kernels.serves(values, memory[:-1].view(1, -1), Scheme("fp8-head"), is_key=True)
    assert not kernels.serves(values, memory[1:].view(1, -1), Scheme("fp8-head"), is_key=True)
