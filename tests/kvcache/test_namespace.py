"""Promises of namespace.py. The naive canonical form is written from the module's docstring, not from its code."""

import json
import struct
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.namespace import MAX_CANONICAL_BYTES, MAX_COUNT, MAX_EXTRA, MAX_TEXT_BYTES, Namespace
from kvstore.protocol.errors import InvalidArgument

VECTORS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("vectors.json").read_text())["namespaces"]
PLAIN = Namespace(model="m", dtype="bfloat16", block_tokens=16)
FIELDS = [field.name for field in fields(Namespace) if field.init]

# Few letters, and those that a length looks like, so that neighbouring fields come near to being taken for one another.
texts = st.text(alphabet="a\0\1é", max_size=3)
names = texts.filter(bool)
pairs = st.none() | st.tuples(st.integers(0, 2), st.integers(3, 4))
namespaces = st.builds(
    Namespace,
    model=names,
    revision=texts,
    adapter=texts,
    dtype=names,
    block_tokens=st.integers(1, 3) | st.just(MAX_COUNT),
    layers=pairs,
    heads=pairs,
    position=texts,
    extra=st.dictionaries(names, texts, max_size=3),
    tenant=texts,
    salt=texts,
    hash=st.sampled_from(["xxh3", "sha256"]),
)


def naive_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def naive_pair(pair: tuple[int, int] | None) -> bytes:
    return b"\0" if pair is None else b"\1" + struct.pack("<II", *pair)


def naive_canonical(namespace: Namespace) -> bytes:
    extra = sorted(namespace.extra.items(), key=lambda entry: entry[0].encode())
    return b"".join(
        [
            b"\1",
            *map(naive_text, [namespace.hash, namespace.model, namespace.revision, namespace.adapter, namespace.dtype]),
            struct.pack("<I", namespace.block_tokens),
            naive_pair(namespace.layers),
            naive_pair(namespace.heads),
            naive_text(namespace.position),
            struct.pack("<I", len(extra)),
            *[naive_text(key) + naive_text(value) for key, value in extra],
            naive_text(namespace.tenant),
            naive_text(namespace.salt),
        ]
    )


def from_vector(vector: dict[str, Any]) -> Namespace:
    given = dict(vector["fields"])
    for pair in ("layers", "heads"):
        if pair in given:
            given[pair] = tuple(given[pair])
    return Namespace(**given)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["name"]))
def test_canonical_form_and_id_are_those_of_the_fixed_vectors(vector: dict[str, Any]) -> None:
    namespace = from_vector(vector)
    assert namespace.canonical().hex() == vector["canonical"]
    assert namespace.id.hex() == vector["id"]
    assert Namespace.from_canonical(bytes.fromhex(vector["canonical"])) == namespace


def test_the_vectors_set_every_field() -> None:
    assert {name for vector in VECTORS for name in vector["fields"]} == set(FIELDS)


@given(namespaces)
def test_the_canonical_form_is_the_documented_one(namespace: Namespace) -> None:
    assert namespace.canonical() == naive_canonical(namespace)


@given(namespaces, namespaces)
def test_namespaces_are_equal_iff_canonical_forms_are(first: Namespace, second: Namespace) -> None:
    assert (first == second) == (first.canonical() == second.canonical())
    assert (first == second) == (first.id == second.id)


@given(st.data(), namespaces, st.sampled_from(FIELDS))
def test_any_changed_field_changes_form_and_id(data: st.DataObject, namespace: Namespace, name: str) -> None:
    other = replace(namespace, **{name: getattr(data.draw(namespaces), name)})
    same = getattr(other, name) == getattr(namespace, name)
    assert (other.canonical() == namespace.canonical()) == same
    assert (other.id == namespace.id) == same


@given(namespaces)
def test_a_namespace_comes_back_from_its_canonical_form(namespace: Namespace) -> None:
    for data in (namespace.canonical(), bytearray(namespace.canonical()), memoryview(namespace.canonical())):
        back = Namespace.from_canonical(data)
        assert back == namespace
        assert back.id == namespace.id
        assert hash(back) == hash(namespace)


@given(namespaces, st.data())
def test_any_other_bytes_are_refused_or_another_namespace(namespace: Namespace, data: st.DataObject) -> None:
    form = bytearray(namespace.canonical())
    form[data.draw(st.integers(0, len(form) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        other = Namespace.from_canonical(form)
    except InvalidArgument:
        return
    assert other != namespace
    assert other.canonical() == form


def test_a_namespace_cannot_be_changed() -> None:
    given = {"image": "336"}
    namespace = replace(PLAIN, extra=given)
    given["image"] = "448"
    assert namespace.extra == {"image": "336"}
    with pytest.raises(TypeError):
        namespace.extra["image"] = "448"  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        namespace.model = "other"  # type: ignore[misc]


def test_the_salt_is_not_shown() -> None:
    assert "secret" not in repr(replace(PLAIN, salt="secret"))


def test_the_largest_namespace_comes_back_within_the_limit() -> None:
    long = "x" * MAX_TEXT_BYTES
    largest = Namespace(
        model=long,
        revision=long,
        adapter=long,
        dtype=long,
        block_tokens=MAX_COUNT,
        layers=(0, MAX_COUNT),
        heads=(MAX_COUNT - 1, MAX_COUNT),
        position=long,
        extra={str(index).ljust(MAX_TEXT_BYTES): long for index in range(MAX_EXTRA)},
        tenant=long,
        salt=long,
        hash="sha256",
    )
    assert len(largest.canonical()) == 40_129 < MAX_CANONICAL_BYTES
    assert Namespace.from_canonical(largest.canonical()) == largest


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": ""}, "model must not be empty"),
        ({"dtype": ""}, "dtype must not be empty"),
        ({"model": b"m"}, "model is a str, not bytes"),
        ({"revision": None}, "revision is a str, not NoneType"),
        ({"adapter": "\ud800"}, "adapter cannot be written as UTF-8"),
        ({"tenant": "é" * 513}, "tenant is at most 1024 bytes of UTF-8, not 1026"),
        ({"position": 10_000}, "position is a str, not int"),
        ({"salt": 1}, "salt is a str, not int"),
        ({"hash": "md5"}, "hash is one of xxh3, sha256, not 'md5'"),
        ({"hash": ["xxh3"]}, "hash is a str, not list"),
        ({"block_tokens": 0}, "block_tokens is an int from 1 to 65536, not 0"),
        ({"block_tokens": MAX_COUNT + 1}, "block_tokens is an int from 1 to 65536, not 65537"),
        ({"block_tokens": 16.0}, r"block_tokens is an int from 1 to 65536, not 16\.0"),
        ({"block_tokens": True}, "block_tokens is an int from 1 to 65536, not True"),
        ({"layers": (4, 4)}, r"0 <= start < end <= 65536, or None for all, not \(4, 4\)"),
        ({"layers": (-1, 4)}, "layers is"),
        ({"layers": (0, MAX_COUNT + 1)}, "layers is"),
        ({"layers": (0, 1, 2)}, "layers is"),
        ({"layers": [0, 1]}, "layers is"),
        ({"heads": (2, 2)}, r"heads is \(rank, size\) with 0 <= rank < size"),
        ({"heads": (0, 0)}, "heads is"),
        ({"heads": ("0", "1")}, "heads is"),
        ({"extra": [("a", "b")]}, "extra is a mapping of str to str, not list"),
        ({"extra": {str(index): "" for index in range(MAX_EXTRA + 1)}}, "extra has at most 16 entries, not 17"),
        ({"extra": {"": "b"}}, "a key of extra must not be empty"),
        ({"extra": {1: "b"}}, "a key of extra is a str, not int"),
        ({"extra": {"a": 1}}, r"extra\['a'\] is a str, not int"),
    ],
)
def test_a_field_outside_its_range_is_refused_with_what_to_do(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": "m", "dtype": "bfloat16", "block_tokens": 16}
    with pytest.raises(InvalidArgument, match=message):
        Namespace(**(given | changed))


def test_another_version_of_the_form_is_refused_by_its_number() -> None:
    with pytest.raises(InvalidArgument, match="a namespace of version 2, this release reads 1"):
        Namespace.from_canonical(b"\2" + PLAIN.canonical()[1:])


def test_a_form_that_is_cut_or_has_more_bytes_is_refused() -> None:
    form = PLAIN.canonical()
    for end in range(len(form)):
        with pytest.raises(InvalidArgument, match="not the canonical form"):
            Namespace.from_canonical(form[:end])
    with pytest.raises(InvalidArgument, match="1 bytes more"):
        Namespace.from_canonical(form + b"\0")


def test_a_form_over_its_limit_is_refused_unread() -> None:
    with pytest.raises(InvalidArgument, match="65537 bytes, over the limit of 65536"):
        Namespace.from_canonical(bytes(MAX_CANONICAL_BYTES + 1))


def test_two_forms_of_one_namespace_are_not_accepted() -> None:
    ordered = replace(PLAIN, extra={"a": "1", "b": "2"}).canonical()
    entries = [naive_text("a") + naive_text("1"), naive_text("b") + naive_text("2")]
    unordered = ordered.replace(b"".join(entries), b"".join(reversed(entries)))
    repeated = ordered.replace(naive_text("b"), naive_text("a"))
    layered = replace(PLAIN, layers=(1, 2)).canonical()
    odd_pair = layered.replace(naive_pair((1, 2)), b"\2" + naive_pair((1, 2))[1:])
    for form in (unordered, repeated, odd_pair):
        with pytest.raises(InvalidArgument, match="encoded differently"):
            Namespace.from_canonical(form)


@pytest.mark.promise("keys-fixed")
def test_block_keys_has_one_key_for_each_full_block() -> None:
    assert [len(key) for key in PLAIN.block_keys(range(40))] == [16, 16]
    assert [len(key) for key in replace(PLAIN, hash="sha256").block_keys(range(40))] == [32, 32]
    assert PLAIN.block_keys(range(40), {0: b"image"})[0] != PLAIN.block_keys(range(40))[0]
