"""Storage schemes of K or V, raw or quantised, and their sizes. Arithmetic without tensors.

A *record* is the stored form of one (block, layer, K or V, head): a payload of `tokens x head_dim` codes, then metadata
(scales, minimums, zero points). A record is self-contained, so a cache can be re-sharded by heads without decoding.
codec.py encodes and decodes records.
"""

import re
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.errors import ConfigError, InvalidArgument

KINDS: Final = ("none", "fp8-tensor", "fp8-head", "int8", "int8a", "int4", "int2")
"""Kinds of schemes. A kind's index is its number in a value's header (`tensor_value.py`), so new kinds are appended.

`none`: raw elements. `fp8-*`: e4m3fn with a float32 scale per tensor or head (arXiv:2209.05433). `int8`: symmetric,
with a float16 scale per token and head; `int8a`: affine, with scale and zero point. `int4`, `int2`: grouped, K per
channel over `group` tokens, V per token over `group` channels, with float16 scale and minimum per group (KIVI,
arXiv:2402.02750).
"""

GROUPS: Final = (16, 32, 64, 128)
"""Group sizes of `int4` and `int2`. A group has 4 bytes of metadata, which adds 32 / group bits per element."""

_BITS: Final = {"none": 0, "fp8-tensor": 8, "fp8-head": 8, "int8": 8, "int8a": 8, "int4": 4, "int2": 2}
_GROUPED: Final = ("int4", "int2")
_ALIASES: Final = {"fp8": "fp8-head"}
_PAIR: Final = re.compile(r"k=([^,=]+),v=([^,=]+)")
_FP8_SCALE_BYTES: Final = 4
_FLOAT16_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Scheme:
    """Scheme of K or V. `group`: elements per group of `int4` and `int2`, else 0.

    Raises InvalidArgument: an unknown kind or group.
    """

    kind: str
    group: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"no scheme {self.kind!r}: there are {', '.join(KINDS)}")
        allowed = GROUPS if self.is_grouped else (0,)
        if self.group not in allowed:
            sizes = ", ".join(map(str, GROUPS))
            raise InvalidArgument(f"group {self.group} of scheme {self.kind}: int4 and int2 have groups of {sizes}, the others none (0)")

    @property
    def bits(self) -> int:
        """Bits of one code without metadata; 0 for `none`, whose elements have the cache's dtype."""
        return _BITS[self.kind]

    @property
    def is_grouped(self) -> bool:
        return self.kind in _GROUPED

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.group}" if self.group else self.kind

    def record_bytes(self, is_key: bool, *, tokens: int, head_dim: int, dtype_bytes: int) -> int:
        """Return payload and metadata of one record. Raises InvalidArgument: the scheme cannot encode `tokens x
        head_dim` (see `check`)."""
        self.check(is_key, tokens=tokens, head_dim=head_dim)
        return self.payload_bytes(is_key, tokens=tokens, head_dim=head_dim, dtype_bytes=dtype_bytes) + self.metadata_bytes(
            is_key, tokens=tokens, head_dim=head_dim, dtype_bytes=dtype_bytes
        )

    def payload_bytes(self, is_key: bool, *, tokens: int, head_dim: int, dtype_bytes: int) -> int:
        """Return the bytes of one record's codes; `dtype_bytes`, the size of an unquantised element, only matters
        for `none`."""
        return tokens * head_dim * (self.bits or dtype_bytes * 8) // 8

    def metadata_bytes(self, is_key: bool, *, tokens: int, head_dim: int, dtype_bytes: int) -> int:
        """Return the bytes of one record's scales, minimums and zero points.

        fp8 4; int8 2 a token; int8a 4 a token; grouped 4 a group, with tokens / group x head_dim groups (K) or tokens x
        head_dim / group (V). `fp8-tensor` repeats the tensor's scale in each record, so that every head is
        self-contained.
        """
        if self.is_grouped:
            return tokens * head_dim // self.group * 2 * _FLOAT16_BYTES
        if self.kind in ("int8", "int8a"):
            return tokens * _FLOAT16_BYTES * (2 if self.kind == "int8a" else 1)
        return 0 if self.kind == "none" else _FP8_SCALE_BYTES

    def check(self, is_key: bool, *, tokens: int, head_dim: int) -> None:
        """Raises InvalidArgument, with alternatives, unless groups divide their axis (K: tokens, V: head_dim)."""
        if tokens < 1 or head_dim < 1:
            raise InvalidArgument(f"a record of {tokens} tokens x {head_dim} channels: both are 1 or more")
        if not self.is_grouped:
            return
        length, axis = (tokens, "block_tokens") if is_key else (head_dim, "head_dim")
        if length % self.group == 0:
            return
        fitting = [f"{self.kind}/{group}" for group in GROUPS if length % group == 0]
        instead = ", ".join(fitting + ["int8", "fp8-head"])
        larger = f"block_tokens of {-(-tokens // self.group) * self.group} or a multiple, or " if is_key else ""
        raise InvalidArgument(
            f"{self.name} of {'K' if is_key else 'V'} needs {axis} to be a multiple of {self.group}, not {length}: use {larger}{instead}"
        )


@dataclass(frozen=True, slots=True)
class CacheScheme:
    """Schemes of K and of V. With MLA, which has one latent for both, only `k` counts."""

    k: Scheme
    v: Scheme

    @classmethod
    def parse(cls, text: str) -> "CacheScheme":
        """Parse a name: one scheme for both (`none`, `fp8-head`, `int4/64`; `fp8` is `fp8-head`), or
        `k=int4/64,v=int2/32`.

        Raises ConfigError, which lists the schemes.
        """
        pair = _PAIR.fullmatch(text)
        if pair:
            return cls(_parse_one(pair[1], text), _parse_one(pair[2], text))
        both = _parse_one(text, text)
        return cls(both, both)

    @property
    def name(self) -> str:
        """Name in the form of `parse`. It is part of a namespace's dtype, so only blocks of equal schemes are
        shared."""
        return self.k.name if self.k == self.v else f"k={self.k.name},v={self.v.name}"

    @property
    def is_raw(self) -> bool:
        return self == NONE

    def of(self, is_key: bool) -> Scheme:
        return self.k if is_key else self.v


NONE: Final = CacheScheme(Scheme("none"), Scheme("none"))


def _parse_one(name: str, text: str) -> Scheme:
    kind, slash, group = name.partition("/")
    kind = _ALIASES.get(kind, kind)
    try:
        return Scheme(kind, int(group) if slash else 0)
    except (ValueError, InvalidArgument):
        there_are = ", ".join(f"{kind}/G" if kind in _GROUPED else kind for kind in KINDS)
        groups = ", ".join(map(str, GROUPS))
        raise ConfigError(
            f"no scheme {text!r}: there are {there_are} (G = {groups}), one for K and V alike or as k=...,v=..., like k=int4/64,v=int2/32"
        ) from None
