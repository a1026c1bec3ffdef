"""Promises of hashing.py, held against a naive chain that packs one token at a time."""

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.hashing import MAX_EXTRA_BYTES, HashName
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("vectors.json").read_text())
FOUR = Namespace(model="m", dtype="bfloat16", block_tokens=4)

hashes: st.SearchStrategy[HashName] = st.sampled_from(["xxh3", "sha256"])
tokens_int32 = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2)


def of(block_tokens: int, hash: HashName = "xxh3") -> Namespace:
    return Namespace(model="m", dtype="bfloat16", block_tokens=block_tokens, hash=hash)


def naive_keys(namespace: Namespace, token_ids: Sequence[int], extras: Mapping[int, bytes]) -> list[bytes]:
    keys: list[bytes] = []
    parent = namespace.id
    for block in range(len(token_ids) // namespace.block_tokens):
        data = parent
        for token in token_ids[block * namespace.block_tokens : (block + 1) * namespace.block_tokens]:
            data += struct.pack("<i", token)
        if block in extras:
            data += struct.pack("<I", len(extras[block])) + extras[block]
        parent = sha256(data).digest() if namespace.hash == "sha256" else xxhash.xxh3_128(data).digest()
        keys.append(parent)
    return keys


@pytest.mark.promise("keys-fixed")
@pytest.mark.parametrize("vector", VECTORS["keys"], ids=lambda vector: str(vector["name"]))
def test_keys_are_those_of_the_fixed_vectors(vector: dict[str, Any]) -> None:
    canonical = next(entry["canonical"] for entry in VECTORS["namespaces"] if entry["name"] == vector["namespace"])
    namespace = Namespace.from_canonical(bytes.fromhex(canonical))
    extras = {int(index): bytes.fromhex(extra) for index, extra in vector["extras"].items()}
    assert [key.hex() for key in namespace.block_keys(vector["token_ids"], extras)] == vector["keys"]


@given(st.lists(tokens_int32, max_size=20), st.integers(1, 5), hashes, st.dictionaries(st.integers(0, 6), st.binary(max_size=3)))
def test_the_keys_are_those_of_the_naive_chain(token_ids: list[int], block_tokens: int, hash: HashName, extras: dict[int, bytes]) -> None:
    namespace = of(block_tokens, hash)
    assert namespace.block_keys(token_ids, extras) == naive_keys(namespace, token_ids, extras)


@given(st.lists(st.integers(0, 127), max_size=12))
def test_every_form_of_the_same_tokens_has_the_same_keys(token_ids: list[int]) -> None:
    expected = naive_keys(FOUR, token_ids, {})
    forms = [
        tuple(token_ids),
        array("i", token_ids),
        array("Q", token_ids),
        memoryview(array("h", token_ids)),
        *[np.array(token_ids, dtype) for dtype in ("i1", "u1", "<i2", ">u2", "<i4", ">i4", "<u4", "<i8", ">i8", "<u8")],
        np.repeat(np.array(token_ids, np.int32), 3)[::3],
        np.array(token_ids[::-1], np.int64)[::-1],
        *[torch.tensor(token_ids, dtype=dtype) for dtype in (torch.uint8, torch.int32, torch.int64)],
        torch.tensor(token_ids, dtype=torch.int64).repeat_interleave(2)[::2],
    ]
    for form in forms:
        assert FOUR.block_keys(form) == expected
    assert FOUR.block_keys(range(len(token_ids))) == naive_keys(FOUR, range(len(token_ids)), {})


def test_the_ends_of_int32_are_tokens_in_every_form() -> None:
    token_ids = [-(2**31), 2**31 - 1, 0, 1]
    expected = naive_keys(FOUR, token_ids, {})
    for form in (token_ids, np.array(token_ids, np.int64), torch.tensor(token_ids)):
        assert FOUR.block_keys(form) == expected


@pytest.mark.promise("keys-fixed")
def test_different_namespaces_share_no_key() -> None:
    others = [of(4), of(4, "sha256"), of(2), Namespace(model="m", dtype="bfloat16", block_tokens=4, tenant="t")]
    keys = [key for namespace in others for key in namespace.block_keys(range(16))]
    assert len(set(keys)) == len(keys)


def test_a_key_stands_for_everything_before_its_block() -> None:
    first, second = FOUR.block_keys(range(12)), FOUR.block_keys([9, *range(1, 12)])
    assert not set(first) & set(second)


def test_an_absent_an_empty_and_a_zero_extra_are_three_blocks() -> None:
    keys = [FOUR.block_keys([0] * 4, extras) for extras in (None, {0: b""}, {0: b"\0"}, {0: b"\0" * MAX_EXTRA_BYTES})]
    assert len({key for (key,) in keys}) == 4
    assert FOUR.block_keys([0] * 8, {1: b"x"})[0] == keys[0][0]
    # One token fewer in a block leaves room for a length of zero where the token was: the namespace's id keeps them apart.
    assert of(3).block_keys([0] * 3, {0: b""}) != keys[0]


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ("text", "not str"),
        (b"\0\0\0\0", "not bytes"),
        (bytearray(4), "not bytearray"),
        (None, "not NoneType"),
        (7, "not int"),
        ({1, 2}, "not set"),
        ((token for token in [1]), "not generator"),
        ([1.0], "'float' object"),
        (["1"], "'str' object"),
        ([[1, 2]], "one dimension: 'list' object"),
        ([5, 6, True], "not bool"),
        ([np.False_], "integers"),
        ([2**31], r"in \[-2\*\*31, 2\*\*31\)"),
        ([-(2**31) - 1], r"in \[-2\*\*31, 2\*\*31\)"),
        (array("d", [1.0]), "not float64"),
        (np.array([1.5]), "not float64"),
        (np.array([True]), "not bool"),
        (np.array([1], object), "not object"),
        (np.array(["1"]), "not <U1"),
        (np.zeros((2, 2), np.int32), r"not shape \(2, 2\)"),
        (np.array(1), r"not shape \(\)"),
        (np.array([1, 2**31]), "not 1 to 2147483648"),
        (np.array([-(2**31) - 1]), "not -2147483649 to"),
        (np.array([2**64 - 1], np.uint64), "not 18446744073709551615 to"),
        (np.array([2**31], np.uint32), "not 2147483648 to"),
        (torch.tensor([1.0]), "not float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), r"not torch\.bfloat16"),
        (torch.tensor([True]), "not bool"),
        (torch.zeros((1, 2), dtype=torch.int64), r"not shape \(1, 2\)"),
        (torch.tensor([2**31]), "not 2147483648 to"),
    ],
)
def test_what_is_no_sequence_of_int32_is_refused(token_ids: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        FOUR.block_keys(token_ids)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({-1: b"x"}, "not -1"),
        ({"1": b"x"}, "not '1'"),
        ({1: "x"}, "the extra of block 1 must be at most 65536 bytes"),
        ({1: bytes(MAX_EXTRA_BYTES + 1)}, "give a hash of the content"),
    ],
)
def test_an_extra_that_cannot_be_hashed_is_refused(extras: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        FOUR.block_keys(range(8), extras)


def test_tokens_are_hashed_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert FOUR.block_keys(range(4)) == naive_keys(FOUR, range(4), {})
