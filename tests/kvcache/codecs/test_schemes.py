"""Schemes: their names, and the bytes that they take by the published formulas."""

import pytest

from kvstore.kvcache.codecs.schemes import GROUPS, KINDS, CacheScheme, Scheme
from kvstore.protocol.errors import ConfigError, InvalidArgument

SHAPE = {"tokens": 128, "head_dim": 128, "dtype_bytes": 2}
ELEMENTS = 128 * 128


@pytest.mark.parametrize(
    "name", ["none", "fp8-tensor", "fp8-head", "int8", "int8a", "int4/16", "int2/128", "k=int4/64,v=int2/32", "k=none,v=int8"]
)
def test_a_name_is_parsed_to_its_scheme(name: str) -> None:
    assert CacheScheme.parse(name).name == name


@pytest.mark.parametrize(
    "text", ["", "int3", "int4", "int4/48", "int4/x", "int8/32", "k=int8", "k=int8,v=", "k=int8,v=fp9", "v=int8,k=int8"]
)
def test_unknown_name_is_rejected_with_the_list(text: str) -> None:
    with pytest.raises(ConfigError, match=r"there are none, fp8-tensor, .*int4/G.*G = 16, 32, 64, 128.*k=int4/64,v=int2/32"):
        CacheScheme.parse(text)


@pytest.mark.parametrize(("kind", "group"), [("int3", 0), ("int4", 0), ("int2", 8), ("int8", 32), ("none", 16)])
def test_a_scheme_that_there_is_not_is_refused(kind: str, group: int) -> None:
    with pytest.raises(InvalidArgument, match=r"there are|have groups of"):
        Scheme(kind, group)


def test_k_and_v_have_their_own_schemes() -> None:
    scheme = CacheScheme.parse("k=int4/64,v=int2/32")
    assert (scheme.of(True), scheme.of(False)) == (Scheme("int4", 64), Scheme("int2", 32))


@pytest.mark.parametrize(
    ("name", "payload_bytes", "metadata_bytes"),
    [
        ("none", ELEMENTS * 2, 0),
        ("fp8-tensor", ELEMENTS, 4),
        ("fp8-head", ELEMENTS, 4),
        ("int8", ELEMENTS, 128 * 2),
        ("int8a", ELEMENTS, 128 * 4),
        ("int4/32", ELEMENTS // 2, ELEMENTS // 32 * 4),
        ("int2/128", ELEMENTS // 4, ELEMENTS // 128 * 4),
    ],
)
@pytest.mark.parametrize("is_key", [True, False])
def test_bytes_of_a_record(name: str, payload_bytes: int, metadata_bytes: int, is_key: bool) -> None:
    scheme = CacheScheme.parse(name).of(is_key)
    assert scheme.payload_bytes(is_key, **SHAPE) == payload_bytes
    assert scheme.metadata_bytes(is_key, **SHAPE) == metadata_bytes
    assert scheme.record_bytes(is_key, **SHAPE) == payload_bytes + metadata_bytes


def test_keys_need_block_tokens_that_groups_divide() -> None:
    with pytest.raises(
        InvalidArgument, match=r"int4/32 of K .* multiple of 32, not 16: use block_tokens of 32 or a multiple, or int4/16, int8, fp8"
    ):
        Scheme("int4", 32).record_bytes(True, tokens=16, head_dim=128, dtype_bytes=2)
    assert Scheme("int4", 32).record_bytes(False, tokens=16, head_dim=128, dtype_bytes=2) == 16 * 64 + 16 * 4 * 4


def test_values_need_a_head_dim_that_groups_divide() -> None:
    with pytest.raises(InvalidArgument, match=r"int2/128 of V needs head_dim .* not 64: use int2/16, int2/32, int2/64, int8, fp8"):
        Scheme("int2", 128).record_bytes(False, tokens=128, head_dim=64, dtype_bytes=2)


def test_numbers_of_kinds_are_those_of_the_format() -> None:
    """Values in tiers carry them: a change here is a change of format."""
    assert KINDS == ("none", "fp8-tensor", "fp8-head", "int8", "int8a", "int4", "int2")
    assert GROUPS == (16, 32, 64, 128)
    assert [Scheme(kind, 16 if kind in ("int4", "int2") else 0).bits for kind in KINDS] == [0, 8, 8, 8, 8, 4, 2]
