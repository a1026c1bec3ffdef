"""Tensor values for the tests of the store: small, of seeded numbers, and what a codec makes of them."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.codecs.tensor_value import TensorHeader, decode_value, encode_value
from kvstore.tiers.value_codec import ValueCodec, decode_into

SHAPE = (2, 2, 2, 16, 32)
"""Layers, K and V, heads, tokens, head_dim."""


@lru_cache(maxsize=256)
def tensor_value(seed: int, shape: tuple[int, ...] = SHAPE, *, dtype: str = "bfloat16", scheme: str = "none") -> bytes:
    """A value of normally distributed numbers."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return bytes(encode_value(numbers.to(getattr(torch, dtype)), CacheScheme.parse(scheme)))


@lru_cache(maxsize=256)
def after(scheme: str, value: bytes) -> bytes:
    """The value that a raw tensor decodes to after encoding by that scheme."""
    encoded = ValueCodec(CacheScheme.parse(scheme)).encode(memoryview(value))
    assert encoded is not None
    back = bytearray(len(value))
    assert decode_into(encoded.data, memoryview(back)) is None
    return bytes(back)


def numbers_of(value: bytes) -> npt.NDArray[np.float32]:
    """The numbers of a tensor value, raw or not."""
    header = TensorHeader.unpack(value)
    assert header is not None
    out = torch.empty(header.shape, dtype=getattr(torch, header.dtype))
    decode_value(value, out)
    return np.asarray(out.float())


def is_raw(value: bytes) -> bool:
    header = TensorHeader.unpack(value)
    return header is not None and header.scheme == NONE
