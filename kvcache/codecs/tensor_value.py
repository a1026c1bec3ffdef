"""Self-describing value of a block: a header of 64 bytes, then the records of each layer's K heads and V heads.

The header, version 1, little-endian:

    8s   magic
    u8   version, 1
    u8   dtype of the unquantised elements: its index in DTYPES
    u8   scheme of K, u8 of V: indexes in schemes.KINDS
    u16  group of K, u16 of V: 0 without groups
    u32  kv factor (2; 1: MLA's one latent, stored by the scheme of K)
    u32  layers, u32 heads, u32 tokens, u32 head_dim
    20x  zeros
    u64  xxh3_64 of the 56 bytes before

Records are in the order layer, K before V, head. So the header alone gives each head's position, and heads are split or
merged without decoding. Reading headers needs no torch; encoding and decoding import it.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.kvcache.codecs.schemes import KINDS, CacheScheme, Scheme
from kvstore.protocol.errors import InvalidArgument, ProtocolError

if TYPE_CHECKING:
    import torch

HEADER_BYTES: Final = 64
MAGIC: Final = b"\x93KVtens\n"
"""Begins with a byte that no text begins with."""
VERSION: Final = 1
DTYPES: Final = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""torch's names of element types; new ones are appended."""
_ITEM_BYTES: Final = (4, 2, 2, 1, 1)
_FORM: Final = struct.Struct("<8s4B2H5I20xQ")
_DIGESTED_BYTES: Final = HEADER_BYTES - 8
_MAX_COUNT: Final = 2**32 - 1

assert _FORM.size == HEADER_BYTES

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Contents of a value: [layers, kv_factor, heads, tokens, head_dim] of `dtype`, stored by `scheme`.

    Raises InvalidArgument: a count outside [1, 2^32), a kv_factor other than 1 or 2, an unknown dtype, or a scheme that
    cannot encode records of this shape.
    """

    scheme: CacheScheme
    dtype: str
    kv_factor: int
    layers: int
    heads: int
    tokens: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgument(f"no element type {self.dtype!r} for tensor values: there are {', '.join(DTYPES)}")
        if self.kv_factor not in (1, 2):
            raise InvalidArgument(f"a tensor value has K and V, or one latent: kv_factor is 2 or 1, not {self.kv_factor}")
        counts = (self.layers, self.heads, self.tokens, self.head_dim)
        if min(counts) < 1 or max(counts) > _MAX_COUNT:
            raise InvalidArgument(f"layers, heads, tokens and head_dim are 1 to {_MAX_COUNT}, not {counts}")
        for kv in range(self.kv_factor):
            self.scheme.of(kv == 0).check(kv == 0, tokens=self.tokens, head_dim=self.head_dim)

    @classmethod
    def unpack(cls, buffer: Buffer) -> "TensorHeader | None":
        """Parse the header at the beginning of `buffer`, a value or its first 64 bytes; None if it is no tensor value.

        A cached header costs a third of a microsecond. Raises ProtocolError: damaged, or of a newer version.
        """
        if len(buffer) < HEADER_BYTES or buffer[:8] != MAGIC:
            return None
        return _parse(bytes(buffer[:HEADER_BYTES]))

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        k, v = self.scheme.k, self.scheme.v
        kinds = (DTYPES.index(self.dtype), KINDS.index(k.kind), KINDS.index(v.kind), k.group, v.group)
        head = _FORM.pack(MAGIC, VERSION, *kinds, self.kv_factor, self.layers, self.heads, self.tokens, self.head_dim, 0)[:_DIGESTED_BYTES]
        return head + xxh3_64_intdigest(head).to_bytes(8, "little")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.layers, self.kv_factor, self.heads, self.tokens, self.head_dim

    @property
    def dtype_bytes(self) -> int:
        return _ITEM_BYTES[DTYPES.index(self.dtype)]

    @property
    def payload_bytes(self) -> int:
        """Codes or raw elements of all records, in bytes."""
        return self._total(Scheme.payload_bytes)

    @property
    def metadata_bytes(self) -> int:
        """Scales, minimums and zero points of all records, in bytes, without the header."""
        return self._total(Scheme.metadata_bytes)

    @property
    def value_bytes(self) -> int:
        return HEADER_BYTES + self._total(Scheme.record_bytes)

    def record_bytes(self, is_key: bool) -> int:
        """Return the bytes of one head's K (or latent), or V, of one layer."""
        scheme = self.scheme.of(is_key)
        return scheme.record_bytes(is_key, tokens=self.tokens, head_dim=self.head_dim, dtype_bytes=self.dtype_bytes)

    def _total(self, part: Callable[..., int]) -> int:
        shape = {"tokens": self.tokens, "head_dim": self.head_dim, "dtype_bytes": self.dtype_bytes}
        each = sum(part(self.scheme.of(kv == 0), kv == 0, **shape) for kv in range(self.kv_factor))
        return self.layers * self.heads * each


@lru_cache(maxsize=256)
def _parse(head: bytes) -> TensorHeader:
    # Cached: all values of a namespace have one header, and a node's event loop reads it.
    _, version, dtype, k_kind, v_kind, k_group, v_group, kv_factor, layers, heads, tokens, head_dim, digest = _FORM.unpack(head)
    if xxh3_64_intdigest(head[:_DIGESTED_BYTES]) != digest:
        raise ProtocolError("the header of a tensor value is damaged: its digest does not match")
    if version != VERSION:
        raise ProtocolError(f"a tensor value of version {version}: this side reads version {VERSION}")
    try:
        scheme = CacheScheme(Scheme(KINDS[k_kind], k_group), Scheme(KINDS[v_kind], v_group))
        return TensorHeader(
            scheme=scheme, dtype=DTYPES[dtype], kv_factor=kv_factor, layers=layers, heads=heads, tokens=tokens, head_dim=head_dim
        )
    except (IndexError, InvalidArgument) as error:
        raise ProtocolError(f"the header of a tensor value is malformed: {error}") from None


def encode_value(tensor: "torch.Tensor", scheme: CacheScheme) -> memoryview:
    """Return the value of `tensor` [layers, kv, heads, tokens, head_dim], with any strides and device: header and
    records, in new memory.

    Raises InvalidArgument: another number of axes, an unknown dtype, a scheme that cannot encode this shape, or finite
    numbers beyond its float16 scales. Raises ConfigError without torch.
    """
    if tensor.dim() != 5:
        raise InvalidArgument(f"a tensor value is [layers, kv, heads, tokens, head_dim], not of {tensor.dim()} axes")
    layers, kv_factor, heads, tokens, head_dim = tensor.shape
    header = TensorHeader(
        scheme=scheme, dtype=_name(tensor), kv_factor=kv_factor, layers=layers, heads=heads, tokens=tokens, head_dim=head_dim
    )
    value, is_damaged = _encoded(tensor, header)
    if is_damaged and _encoded(without_others(tensor), header)[1]:
        raise InvalidArgument(f"numbers too large for the float16 scales of {scheme.name}: use fp8-head, whose scales are float32")
    return value


def without_others(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor with 0 for non-finite numbers: what a scheme still encodes as NaN is beyond its scales."""
    return tensor.float().nan_to_num(0.0, 0.0, 0.0).to(tensor.dtype)


def decode_value(buffer: Buffer, out: "torch.Tensor") -> None:
    """Decode a value into `out` [layers, kv, heads, tokens, head_dim] of the value's dtype, with any strides and
    device.

    Raises InvalidArgument: `buffer` is no tensor value, or `out` has another shape or dtype. Raises ProtocolError: a
    damaged value, or one whose size does not match its header. Raises ConfigError without torch.
    """
    header = TensorHeader.unpack(buffer)
    if header is None:
        raise InvalidArgument(f"{len(buffer)} bytes that do not begin with the header of a tensor value")
    if tuple(out.shape) != header.shape or _name(out) != header.dtype:
        raise InvalidArgument(f"a value of {header.dtype} {list(header.shape)} does not go into {_name(out)} {list(out.shape)}")
    codec = _codec()
    rows = _rows(buffer, header).to(out.device)
    for kv, records in enumerate(_records(rows, header)):
        codec.decode(
            records,
            header.scheme.of(kv == 0),
            is_key=kv == 0,
            tokens=header.tokens,
            head_dim=header.head_dim,
            dtype=out.dtype,
            out=out[:, kv],
        )


def transcode(value: Buffer, scheme: CacheScheme) -> memoryview | None:
    """Return the raw tensor value `value` encoded by `scheme`, or None to keep it as it is.

    None if:

    - it is no tensor value, or a damaged one: opaque bytes may begin like a tensor value;
    - it is already quantised;
    - `scheme` cannot encode its shape, or does not make it smaller;
    - numbers would be lost, including non-finite ones.

    Raises ConfigError without torch.
    """
    codec = _codec()
    try:
        raw = TensorHeader.unpack(value)
        if raw is None or not raw.scheme.is_raw or len(value) != raw.value_bytes:
            return None
        header = replace(raw, scheme=scheme)
    except (InvalidArgument, ProtocolError):
        return None
    if header.value_bytes >= raw.value_bytes:
        return None
    tensor = _rows(value, raw).view(getattr(codec.torch, raw.dtype)).view(raw.shape)
    encoded, is_damaged = _encoded(tensor, header)
    return None if is_damaged else encoded


def _encoded(tensor: "torch.Tensor", header: TensorHeader) -> tuple[memoryview, bool]:
    """Return the value, and whether numbers were lost to NaN."""
    codec = _codec()
    value = np.empty(header.value_bytes, np.uint8)
    value[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    host = _rows(value.data, header)
    rows = _rows_on(tensor.device, host)
    for kv, records in enumerate(_records(rows, header)):
        codec.encode(tensor[:, kv], header.scheme.of(kv == 0), is_key=kv == 0, out=records)
    host.copy_(rows)
    shape = {"tokens": header.tokens, "head_dim": header.head_dim}
    is_damaged = any(
        codec.has_lost(records, header.scheme.of(kv == 0), is_key=kv == 0, **shape) for kv, records in enumerate(_records(host, header))
    )
    return value.data, is_damaged


def _rows(value: Buffer, header: TensorHeader) -> "torch.Tensor":
    """Return a value's records as a tensor [layers, bytes] over its own memory. If that is read-only, the tensor
    must not be written to."""
    if len(value) != header.value_bytes:
        raise ProtocolError(f"a tensor value of {len(value)} bytes, but its header gives {header.value_bytes}")
    array = np.asarray(_Memory(np.frombuffer(value, np.uint8)))
    return cast("torch.Tensor", _codec().torch.from_numpy(array)[HEADER_BYTES:].view(header.layers, -1))


def _rows_on(device: "torch.device", host: "torch.Tensor") -> "torch.Tensor":
    """Return `host` itself if it is on `device`, else new memory of its shape there: records are encoded on the
    values' device."""
    return host if device == host.device else _codec().torch.empty_like(host, device=device)


def _records(rows: "torch.Tensor", header: TensorHeader) -> Iterator["torch.Tensor"]:
    """Yield views of `rows` as the records of K (or the latent) and of V: [layers, heads, record_bytes] each."""
    at = 0
    for kv in range(header.kv_factor):
        size = header.record_bytes(kv == 0)
        yield rows[:, at : at + header.heads * size].unflatten(-1, (header.heads, size))
        at += header.heads * size


def _name(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _codec() -> Any:
    from kvstore.kvcache.codecs import codec

    return codec


class _Memory:
    """Read-only memory presented to numpy as writable: torch has no read-only tensors and warns of such arrays."""

    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
