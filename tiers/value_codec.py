"""Tensor values on their way to a tier that keeps them quantised, and back. It stores nothing and owns no slot.

Only values that say of themselves that they are raw tensors (kvcache/codecs/tensor_value.py) are encoded, and only where that makes them
smaller; every other value is none of its business. A value that comes back has the size and the header that it had, and other elements.
Where nothing is encoded, torch is not imported.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import xxhash

from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.codecs.tensor_value import HEADER_BYTES, MAGIC, TensorHeader, decode_value, transcode
from kvstore.protocol.errors import ConfigError, Corrupt, InvalidArgument, ProtocolError
from kvstore.protocol.extras import install_line
from kvstore.tiers.tier import Buffer


class Encoding(NamedTuple):
    """What a value takes once it is encoded: all bytes, of these those of the codes (the rest are scales and the header), elements."""

    size_bytes: int
    payload_bytes: int
    elements: int


class Encoded(NamedTuple):
    """An encoded value. `decoded_checksum` is the xxh3_64 of what readers get, `checksum` that of `data`."""

    data: Buffer
    checksum: int
    decoded_checksum: int


class ValueCodec:
    """Encodes by one scheme. Any thread may call it."""

    def __init__(self, scheme: CacheScheme) -> None:
        """Raises ConfigError without torch."""
        require_torch(f"values are quantised to {scheme.name}")
        self._scheme = scheme
        # The blocks of a model have one header: a dictionary look-up by its bytes costs the loop a microsecond, the header itself twenty.
        self._encoding = lru_cache(maxsize=1024)(self._find_encoding)

    @property
    def name(self) -> str:
        return self._scheme.name

    def encoding(self, value: memoryview) -> Encoding | None:
        """What `value` takes once encoded; None for one that stays as it is. Looks at its first 64 bytes: it is for a loop."""
        head = bytes(value[:HEADER_BYTES])
        return self._encoding(head, value.nbytes) if head.startswith(MAGIC) else None

    def _find_encoding(self, head: bytes, size_bytes: int) -> Encoding | None:
        raw = _raw_header(head, size_bytes)
        if raw is None:
            return None
        try:
            encoded = replace(raw, scheme=self._scheme)
        except InvalidArgument:  # groups that do not divide these axes
            return None
        elements = raw.layers * raw.kv_factor * raw.heads * raw.tokens * raw.head_dim
        is_smaller = encoded.value_bytes < raw.value_bytes
        return Encoding(encoded.value_bytes, encoded.payload_bytes, elements) if is_smaller else None

    def encode(self, value: memoryview) -> Encoded | None:
        """The encoded value, in new memory; None for one that the scheme would lose numbers of (non-finite ones, say).

        Decodes it once, to know what readers will get. Its memory is free for others after the call.
        """
        data = transcode(value, self._scheme)
        if data is None:
            return None
        decoded = memoryview(bytearray(value.nbytes))
        if (error := decode_into(data, decoded)) is not None:
            raise error
        return Encoded(data, xxhash.xxh3_64_intdigest(data), xxhash.xxh3_64_intdigest(decoded))


def make_codec(name: str) -> ValueCodec | None:
    """The codec of a scheme's name; None for `none`. Raises ConfigError: there is no such scheme, or no torch."""
    scheme = CacheScheme.parse(name)
    return None if scheme == NONE else ValueCodec(scheme)


def decode_into(data: Buffer, destination: memoryview) -> Corrupt | None:
    """Decode an encoded value of whatever scheme into memory of the raw value's size. An error is returned, for one of many reads."""
    try:
        header = TensorHeader.unpack(data)
    except ProtocolError as damaged:
        return Corrupt(str(damaged))
    raw = replace(header, scheme=NONE) if header is not None else None
    if header is None or raw is None or (header.value_bytes, raw.value_bytes) != (len(data), destination.nbytes):
        return Corrupt(f"{len(data)} bytes are not the encoded form of a tensor value of {destination.nbytes} bytes")
    target = destination.cast("B")
    target[:HEADER_BYTES] = raw.pack()
    decode_value(data, _tensor(raw, target[HEADER_BYTES:]))
    return None


def is_raw_tensor(value: memoryview) -> bool:
    """Whether the value says that it is a tensor that is not quantised: the one kind of value that a tier may give back changed."""
    return _raw_header(bytes(value[:HEADER_BYTES]), value.nbytes) is not None


def require_torch(why: str) -> None:
    """Raises ConfigError, which says why, where torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as missing:
        raise ConfigError(f"{why} with torch: {install_line('hbm')}") from missing


def _raw_header(head: bytes, size_bytes: int) -> TensorHeader | None:
    """Of a value that begins with `head`, if it is a raw tensor; of opaque bytes and of others None."""
    try:
        header = TensorHeader.unpack(head)
    except ProtocolError:  # opaque bytes may begin like a tensor value
        return None
    return header if header is not None and header.scheme == NONE and header.value_bytes == size_bytes else None


def _tensor(raw: TensorHeader, target: memoryview) -> Any:
    """The memory of a raw value behind its header as a torch tensor."""
    import torch

    return torch.frombuffer(target, dtype=getattr(torch, raw.dtype)).view(raw.shape)
