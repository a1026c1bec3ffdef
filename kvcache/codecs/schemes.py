"""How one of K or V is stored: raw, or quantised, and the bytes that takes. Numbers only: nothing here touches a tensor.

A *record* is what is stored for one (block, layer, K or V, head): its payload of `tokens x head_dim` codes, then its metadata (scales,
minimums, zero points). All that a head needs lies in its own record, so that a cache is sharded anew by heads without decoding.
`kvcache/codecs/codec.py` makes records and reads them.
"""

import re
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.errors import ConfigError, InvalidArgument

KINDS: Final = ("none", "fp8-tensor", "fp8-head", "int8", "int8a", "int4", "int2")
"""Kinds of schemes; a kind's index is its number in the header of a value (`tensor_value.py`), so that new ones go to the end.

`none` raw elements. `fp8-*` e4m3fn with a float32 scale a tensor or a head (arXiv:2209.05433). `int8` symmetric with a float16 scale a
token and head; `int8a` affine: a scale and a zero point. `int4`, `int2` grouped: K per channel over `group` tokens, V per token
over `group` channels, a float16 scale and minimum a group (KIVI, arXiv:2402.02750).
"""

GROUPS: Final = (16, 32, 64, 128)
"""Elements of a group that `int4` and `int2` may have. 4 bytes of metadata a group: 32 / group bits an element on top."""

_BITS: Final = {"none": 0, "fp8-tensor": 8, "fp8-head": 8, "int8": 8, "int8a": 8, "int4": 4, "int2": 2}
_GROUPED: Final = ("int4", "int2")
_ALIASES: Final = {"fp8": "fp8-head"}
_PAIR: Final = re.compile(r"k=([^,=]+),v=([^,=]+)")
_FP8_SCALE_BYTES: Final = 4
_FLOAT16_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Scheme:
    """How K or V is stored. `group` is the elements of a group of `int4` and `int2`, 0 of the others.

    Raises InvalidArgument for a kind or group that there is not.
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
        """Bits of one code without metadata; 0 of `none`, whose elements have those of the cache's dtype."""
        return _BITS[self.kind]

    @property
    def is_grouped(self) -> bool:
        return self.kind in _GROUPED

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.group}" if self.group else self.kind

    def record_bytes(self, is_key: bool, *, tokens: int, head_dim: int, dtype_bytes: int) -> int:
        """Payload and metadata of one record. Raises InvalidArgument when this scheme cannot cut `tokens x head_dim` (see `check`)."""
        self.check(is_key, tokens=tokens, head_dim=head_dim)
        return self.payload_bytes(is_key, tokens=tokens, head_dim=head_dim, dtype_bytes=dtype_bytes) + self.metadata_bytes(
            is_key, tokens=tokens, head_dim=head_dim, dtype_bytes=dtype_bytes
        )

    def payload_bytes(self, is_key: bool, *, tokens: int, head_dim: int, dtype_bytes: int) -> int:
        """Bytes of one record's codes; `dtype_bytes`, the size of an unquantised element, counts for `none` only."""
        return tokens * head_dim * (self.bits or dtype_bytes * 8) // 8

    def metadata_bytes(self, is_key: bool, *, tokens: int, head_dim: int, dtype_bytes: int) -> int:
        """Bytes of one record's scales, minimums and zero points.

        fp8 4; int8 2 a token; int8a 4 a token; grouped 4 a group, of which there are tokens / group x head_dim (K) or
        tokens x head_dim / group (V). `fp8-tensor` repeats the tensor's scale in each record: a head must be readable by itself.
        """
        if self.is_grouped:
            return tokens * head_dim // self.group * 2 * _FLOAT16_BYTES
        if self.kind in ("int8", "int8a"):
            return tokens * _FLOAT16_BYTES * (2 if self.kind == "int8a" else 1)
        return 0 if self.kind == "none" else _FP8_SCALE_BYTES

    def check(self, is_key: bool, *, tokens: int, head_dim: int) -> None:
        """Raises InvalidArgument, saying what would do, unless groups divide the axis that they run along (K: tokens, V: head_dim)."""
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
    """How a cache is stored: the schemes of K and of V. With MLA, which has one latent for both, `k` alone counts."""

    k: Scheme
    v: Scheme

    @classmethod
    def parse(cls, text: str) -> "CacheScheme":
        """From a name: one scheme for both (`none`, `fp8-head`, `int4/64`; `fp8` is `fp8-head`), or `k=int4/64,v=int2/32`.

        Raises ConfigError that lists what there is.
        """
        pair = _PAIR.fullmatch(text)
        if pair:
            return cls(_parse_one(pair[1], text), _parse_one(pair[2], text))
        both = _parse_one(text, text)
        return cls(both, both)

    @property
    def name(self) -> str:
        """What `parse` reads; goes into a namespace's dtype, so that only blocks of one scheme are shared."""
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
