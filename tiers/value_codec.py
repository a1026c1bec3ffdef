"""Quantisation of tensor values on their way to and from a tier. Stores nothing.

Only values with a raw tensor header (kvcache/codecs/tensor_value.py) are encoded, and only if that makes them smaller.
A decoded value has the original size and header but approximate elements. torch is imported only when a codec is made.
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
    """Sizes of an encoded value: all bytes, bytes of the codes (the rest are scales and the header), number of
    elements.
    """

    size_bytes: int
    payload_bytes: int
    elements: int


class Encoded(NamedTuple):
    """An encoded value. `decoded_checksum` is the xxh3_64 that readers see, `checksum` that of `data`."""

    data: Buffer
    checksum: int
    decoded_checksum: int


class ValueCodec:
    """Encodes values by one scheme. Thread-safe."""

    def __init__(self, scheme: CacheScheme) -> None:
        """Raises ConfigError if torch is not installed."""
        require_torch(f"values are quantised to {scheme.name}")
        self._scheme = scheme
        # Blocks of a model share one header: a cache look-up costs 1 us, parsing the header 20 us.
        self._encoding = lru_cache(maxsize=1024)(self._find_encoding)

    @property
    def name(self) -> str:
        return self._scheme.name

    def encoding(self, value: memoryview) -> Encoding | None:
        """Return the encoded sizes of `value`, or None if it stays raw. Reads only its first 64 bytes; cheap enough for
        an event loop.
        """
        head = bytes(value[:HEADER_BYTES])
        return self._encoding(head, value.nbytes) if head.startswith(MAGIC) else None

    def _find_encoding(self, head: bytes, size_bytes: int) -> Encoding | None:
        raw = _raw_header(head, size_bytes)
        if raw is None:
            return None
        try:
            encoded = replace(raw, scheme=self._scheme)
        except InvalidArgument:  # the scheme's groups do not divide these axes
            return None
        elements = raw.layers * raw.kv_factor * raw.heads * raw.tokens * raw.head_dim
        is_smaller = encoded.value_bytes < raw.value_bytes
        return Encoding(encoded.value_bytes, encoded.payload_bytes, elements) if is_smaller else None

    def encode(self, value: memoryview) -> Encoded | None:
        """Return the encoded value in new memory, or None if the scheme cannot represent its numbers (non-finite ones,
        for example).

        Decodes it once, for the checksum that readers will see.
        """
        data = transcode(value, self._scheme)
        if data is None:
            return None
        decoded = memoryview(bytearray(value.nbytes))
        if (error := decode_into(data, decoded)) is not None:
            raise error
        return Encoded(data, xxhash.xxh3_64_intdigest(data), xxhash.xxh3_64_intdigest(decoded))


def make_codec(name: str) -> ValueCodec | None:
    """Return the codec of a scheme; None for `none`. Raises ConfigError: unknown scheme, or no torch."""
    scheme = CacheScheme.parse(name)
    return None if scheme == NONE else ValueCodec(scheme)


def decode_into(data: Buffer, destination: memoryview) -> Corrupt | None:
    """Decode an encoded value of any scheme into memory of the raw value's size. Returns an error instead of raising
    it.
    """
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
    """Return True if the value is an unquantised tensor, the only kind that a tier may return changed."""
    return _raw_header(bytes(value[:HEADER_BYTES]), value.nbytes) is not None


def require_torch(why: str) -> None:
    """Raises ConfigError with the reason `why` if torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as missing:
        raise ConfigError(f"{why} with torch: {install_line('hbm')}") from missing


def _raw_header(head: bytes, size_bytes: int) -> TensorHeader | None:
    """Return the header if a value that begins with `head` is a raw tensor, else None."""
    try:
        header = TensorHeader.unpack(head)
    except ProtocolError:  # opaque bytes may begin like a tensor value
        return None
    return header if header is not None and header.scheme == NONE and header.value_bytes == size_bytes else None


def _tensor(raw: TensorHeader, target: memoryview) -> Any:
    """Return the memory behind a raw value's header as a torch tensor."""
    import torch

    return torch.frombuffer(target, dtype=getattr(torch, raw.dtype)).view(raw.shape)
