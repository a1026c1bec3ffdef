"""Namespace of a block: everything that changes its values, with a canonical byte form and a 16-byte id.

Two engines share blocks exactly if their namespaces are equal in every field. hashing.py computes block keys from the
id and token ids.

The canonical form, version 1. Integers are little-endian; a text is its length in bytes as u32 and its UTF-8 bytes, not
normalised; a pair is u8 0 for None, else u8 1 and two u32. In this order:

    u8      version, 1
    text    hash
    text    model
    text    revision
    text    adapter
    text    dtype
    u32     block_tokens
    pair    layers: start, end
    pair    heads: rank, size
    text    position
    u32     entries of extra, then for each a text key and a text value, by rising UTF-8 bytes of the key
    text    tenant
    text    salt

The id is the first 16 bytes of the hash (xxh3_128 or SHA-256) of these bytes. tests/kvcache/vectors.json fixes both: a
change here is a change of format and needs another version number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, cast

from kvstore.kvcache.hashing import HASHES, HashName, TokenIds, chain_keys
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.protocol.wire import Reader, Writer

VERSION: Final = 1
ID_BYTES: Final = 16
MAX_TEXT_BYTES: Final = 1024
"""Limit of a text in UTF-8."""
MAX_EXTRA: Final = 16
"""Limit of `extra`'s entries."""
MAX_CANONICAL_BYTES: Final = 65_536
"""Limit of a catalog record. With the limits above, a canonical form has at most 40,129 bytes."""
MAX_COUNT: Final = 65_536
"""Maximum of tokens in a block, layers in a model and ranks in a tensor-parallel group."""

_TEXT_FIELDS: Final = ("hash", "model", "revision", "adapter", "dtype", "position", "tenant", "salt")
_REQUIRED: Final = frozenset({"hash", "model", "dtype"})

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Fields that blocks must agree on to be interchangeable. Immutable and hashable.

    Raises:
        InvalidArgument: a field is outside its range.
    """

    model: str
    """Not empty. All texts have at most MAX_TEXT_BYTES of UTF-8."""
    revision: str = ""
    adapter: str = ""
    """LoRA or other adapter on top of the model."""
    dtype: str
    """Element type or quantisation scheme, as `bfloat16` or `fp8_e4m3/per-head`. Not empty."""
    block_tokens: int
    """Tokens in a block, 1 to MAX_COUNT."""
    layers: Pair | None = None
    """Layers [start, end) in the blocks; None: all."""
    heads: Pair | None = None
    """(rank, size): KV heads of tensor-parallel `rank` of `size`; None: all."""
    position: str = ""
    """Position encoding with its scaling."""
    extra: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Everything else that changes the values, such as multimodal settings: at most MAX_EXTRA entries. Copied,
    read-only."""
    tenant: str = ""
    salt: str = field(default="", repr=False)
    """Makes ids unpredictable from the other fields. Not in the repr, which is logged."""
    hash: HashName = "xxh3"
    """Hash of the id and the block keys: `xxh3`, or `sha256` if tenants do not trust each other."""
    id: bytes = field(init=False, repr=False, compare=False)
    """ID_BYTES bytes, the root of the key chain."""

    def __post_init__(self) -> None:
        for name in _TEXT_FIELDS:
            _check_text(name, getattr(self, name), required=name in _REQUIRED)
        if self.hash not in HASHES:
            raise InvalidArgument(f"hash is one of {', '.join(HASHES)}, not {self.hash!r}")
        if not _is_count(self.block_tokens) or self.block_tokens < 1:
            raise InvalidArgument(f"block_tokens is an int from 1 to {MAX_COUNT}, not {self.block_tokens!r}")
        if self.layers is not None and not (_is_pair(self.layers) and self.layers[0] < self.layers[1]):
            raise InvalidArgument(f"layers is (start, end) with 0 <= start < end <= {MAX_COUNT}, or None for all, not {self.layers!r}")
        if self.heads is not None and not (_is_pair(self.heads) and self.heads[0] < self.heads[1]):
            raise InvalidArgument(f"heads is (rank, size) with 0 <= rank < size <= {MAX_COUNT}, or None for all, not {self.heads!r}")
        object.__setattr__(self, "extra", _canonical_extra(self.extra))
        object.__setattr__(self, "id", HASHES[self.hash](self.canonical())[:ID_BYTES])

    def canonical(self) -> bytes:
        """Return the canonical form, equal exactly for equal namespaces."""
        writer = Writer().u8(VERSION).text(self.hash)
        writer.text(self.model).text(self.revision).text(self.adapter).text(self.dtype).u32(self.block_tokens)
        _write_pair(writer, self.layers)
        _write_pair(writer, self.heads)
        writer.text(self.position).u32(len(self.extra))
        for key, value in self.extra.items():
            writer.text(key).text(value)
        return writer.text(self.tenant).text(self.salt).done()

    @classmethod
    def from_canonical(cls, data: bytes | bytearray | memoryview) -> "Namespace":
        """Return the namespace with this canonical form.

        Raises:
            InvalidArgument: `data` is not a canonical form of this version.
        """
        if len(data) > MAX_CANONICAL_BYTES:
            raise InvalidArgument(f"not the canonical form of a namespace: {len(data)} bytes, over the limit of {MAX_CANONICAL_BYTES}")
        try:
            namespace = cls._read(Reader(data))
        except ProtocolError as error:
            raise InvalidArgument(f"not the canonical form of a namespace: {error}") from error
        if namespace.canonical() != data:
            raise InvalidArgument("not the canonical form of a namespace: its pairs or its extra are encoded differently")
        return namespace

    @classmethod
    def _read(cls, reader: Reader) -> "Namespace":
        version = reader.u8()
        if version != VERSION:
            raise InvalidArgument(f"a namespace of version {version}, this release reads {VERSION}: run the same release on both sides")
        # Python evaluates arguments in the order written, which is the order of the form.
        namespace = cls(
            hash=cast(HashName, reader.text()),
            model=reader.text(),
            revision=reader.text(),
            adapter=reader.text(),
            dtype=reader.text(),
            block_tokens=reader.u32(),
            layers=_read_pair(reader),
            heads=_read_pair(reader),
            position=reader.text(),
            extra={reader.text(): reader.text() for _ in range(reader.u32())},
            tenant=reader.text(),
            salt=reader.text(),
        )
        reader.end()
        return namespace

    def block_keys(self, token_ids: TokenIds, extras: Mapping[int, bytes] | None = None) -> list[bytes]:
        """Return a key for each full block of `token_ids`: 16 bytes with xxh3, 32 with sha256. A partial last block has
        none.

        `extras` maps a block's index, from 0, to bytes that also change its values, such as the hash of an image.

        Raises:
            InvalidArgument: see `chain_keys`.
        """
        return chain_keys(self.id, self.hash, self.block_tokens, token_ids, extras)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_count, value))


def _check_text(name: str, value: object, *, required: bool) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is a str, not {type(value).__name__}")
    if required and not value:
        raise InvalidArgument(f"{name} must not be empty: blocks of different kinds would share keys")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} cannot be written as UTF-8: {error.reason}") from error
    if size_bytes > MAX_TEXT_BYTES:
        raise InvalidArgument(f"{name} is at most {MAX_TEXT_BYTES} bytes of UTF-8, not {size_bytes}: give a name or a hash of it")


def _canonical_extra(extra: object) -> Mapping[str, str]:
    if not isinstance(extra, Mapping):
        raise InvalidArgument(f"extra is a mapping of str to str, not {type(extra).__name__}")
    if len(extra) > MAX_EXTRA:
        raise InvalidArgument(f"extra has at most {MAX_EXTRA} entries, not {len(extra)}: hash what belongs together into one")
    for key, value in extra.items():
        _check_text("a key of extra", key, required=True)
        _check_text(f"extra[{key!r}]", value, required=False)
    return MappingProxyType(dict(sorted(extra.items(), key=lambda entry: entry[0].encode())))


def _write_pair(writer: Writer, pair: Pair | None) -> None:
    writer.u8(pair is not None)
    for value in pair or ():
        writer.u32(value)


def _read_pair(reader: Reader) -> Pair | None:
    return (reader.u32(), reader.u32()) if reader.u8() else None
