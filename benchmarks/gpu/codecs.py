"""Codecs on the device: bytes read and written a second, as a share of what a copy within the device reads and writes."""

from collections.abc import Iterator
from typing import Any, Final

import torch

from benchmarks.gpu.device import DEVICE, HAS_CUDA, gb_s
from kvstore.cli.tools.bench import BenchRow
from kvstore.kvcache.codecs.codec import decode, encode
from kvstore.kvcache.codecs.schemes import Scheme

SCHEMES: Final = (
    Scheme("fp8-tensor"),
    Scheme("fp8-head"),
    Scheme("int8"),
    Scheme("int8a"),
    Scheme("int4", 32),
    Scheme("int4", 64),
    Scheme("int2", 32),
)
SHAPE: Final = (64, 32, 8, 64, 128) if HAS_CUDA else (2, 2, 2, 64, 128)
"""Blocks, layers, heads, tokens, head_dim: 256 MiB of bfloat16, several times the L2 cache."""


def rows() -> Iterator[BenchRow]:
    values = torch.randn(SHAPE, device=DEVICE, dtype=torch.bfloat16)
    back = torch.empty_like(values)
    limit = gb_s(2 * values.nbytes, lambda: back.copy_(values))
    yield BenchRow(f"copy within the device, {values.nbytes >> 20} MiB, read + written: the limit", limit, "GB/s")
    for scheme in SCHEMES:
        for is_key in (True, False):
            yield from coding(scheme, values, back, is_key=is_key, limit=limit)


def coding(scheme: Scheme, values: Any, back: Any, *, is_key: bool, limit: float) -> Iterator[BenchRow]:
    records = encode(values, scheme, is_key=is_key)
    sizes = {"tokens": SHAPE[-2], "head_dim": SHAPE[-1], "dtype": values.dtype}
    moved_bytes = values.nbytes + records.nbytes
    name = f"{scheme.name} of {'K' if is_key else 'V'}"
    encoded = gb_s(moved_bytes, lambda: encode(values, scheme, is_key=is_key, out=records))
    decoded = gb_s(moved_bytes, lambda: decode(records, scheme, is_key=is_key, **sizes, out=back))
    for verb, speed in (("encode", encoded), ("decode", decoded)):
        yield BenchRow(f"{name}: {verb}", speed, "GB/s")
        yield BenchRow(f"{name}: {verb} / limit", speed / limit, "ratio")
