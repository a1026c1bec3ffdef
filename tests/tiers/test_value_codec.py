"""Promises of value_codec.py: which values are encoded, what comes back of them, and that nothing else is touched."""

import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash

from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.codecs.tensor_value import HEADER_BYTES, TensorHeader, decode_value, encode_value
from kvstore.protocol.errors import ConfigError, Corrupt
from kvstore.tiers.value_codec import Encoding, ValueCodec, decode_into, is_raw_tensor, make_codec, require_torch

SHAPE = (2, 2, 3, 16, 32)
ELEMENTS = 2 * 2 * 3 * 16 * 32
RECORDS = 2 * 2 * 3


def raw(*, dtype: str = "bfloat16", shape: tuple[int, ...] = SHAPE, scheme: str = "none") -> memoryview:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(getattr(torch, dtype))
    return encode_value(numbers, CacheScheme.parse(scheme))


def codec(name: str) -> ValueCodec:
    made = make_codec(name)
    assert made is not None
    return made


def numbers_of(value: memoryview) -> npt.NDArray[np.float32]:
    header = TensorHeader.unpack(value)
    assert header is not None
    out = torch.empty(header.shape, dtype=getattr(torch, header.dtype))
    decode_value(value, out)
    return np.asarray(out.float())


def and_back(name: str, value: memoryview) -> memoryview:
    encoded = codec(name).encode(value)
    assert encoded is not None
    assert encoded.checksum == xxhash.xxh3_64_intdigest(encoded.data)
    back = memoryview(bytearray(value.nbytes))
    assert decode_into(encoded.data, back) is None
    assert encoded.decoded_checksum == xxhash.xxh3_64_intdigest(back)
    return back


@pytest.mark.parametrize(
    ("name", "payload_bytes", "metadata_bytes"),
    [
        ("fp8-head", ELEMENTS, RECORDS * 4),
        ("int8", ELEMENTS, RECORDS * 16 * 2),
        ("int4/16", ELEMENTS // 2, ELEMENTS // 16 * 4),
        ("k=int8,v=int2/32", ELEMENTS // 2 + ELEMENTS // 8, RECORDS // 2 * (16 * 2 + 16 * 4)),
    ],
)
def test_encoding_predicts_the_encoded_size(name: str, payload_bytes: int, metadata_bytes: int) -> None:
    value = raw()
    size_bytes = HEADER_BYTES + payload_bytes + metadata_bytes
    assert codec(name).encoding(value) == Encoding(size_bytes, payload_bytes, ELEMENTS)
    encoded = codec(name).encode(value)
    assert encoded is not None
    assert memoryview(encoded.data).nbytes == size_bytes


@pytest.mark.parametrize(("name", "error"), [("fp8-head", 0.06), ("fp8-tensor", 0.06), ("int8", 0.01), ("int8a", 0.01), ("int4/32", 0.1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_decoding_restores_size_header_and_close_values(name: str, error: float, dtype: str) -> None:
    value = raw(dtype=dtype, shape=(2, 2, 3, 32, 32))
    back = and_back(name, value)
    assert back[:HEADER_BYTES] == value[:HEADER_BYTES]
    before, after = numbers_of(value), numbers_of(back)
    assert before.tolist() != after.tolist()
    assert np.abs(after - before).max() <= error * np.abs(before).max()


def test_only_whole_raw_tensors_that_become_smaller_are_encoded() -> None:
    damaged = bytearray(raw())
    damaged[20] ^= 1
    others = {
        "opaque": memoryview(b"opaque bytes" * 100),
        "short": memoryview(b"x"),
        "cut": raw()[:-1],
        "longer": memoryview(bytes(raw()) + b"x"),
        "damaged": memoryview(damaged),
        "quantised": raw(scheme="int8"),
    }
    for name, value in others.items():
        assert not is_raw_tensor(value), name
        assert codec("fp8-head").encoding(value) is None, name
    assert is_raw_tensor(raw())
    assert codec("int4/64").encoding(raw()) is None, "16 tokens are no groups of 64"
    one_byte = raw(dtype="float8_e4m3fn")
    assert codec("fp8-head").encoding(one_byte) is None, "scales make it larger"
    assert codec("int4/16").encoding(one_byte) is not None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_value_outside_the_schemes_range_is_not_encoded(number: float) -> None:
    numbers = torch.zeros(SHAPE)
    numbers[1, 0, 2, 3, 4] = number
    value = encode_value(numbers, NONE)
    assert codec("int8").encoding(value) is not None, "the header tells nothing of it"
    assert codec("int8").encode(value) is None


def test_what_does_not_decode_says_so() -> None:
    encoded = codec("int8").encode(raw())
    assert encoded is not None
    data = bytearray(encoded.data)
    room = memoryview(bytearray(raw().nbytes))
    assert isinstance(decode_into(b"opaque" * 50, room), Corrupt)
    assert isinstance(decode_into(data[:-1], room), Corrupt)
    assert isinstance(decode_into(data, room[:-1]), Corrupt)
    data[30] ^= 1
    wrong = decode_into(data, room)
    assert isinstance(wrong, Corrupt)
    assert "damaged" in str(wrong)


def test_make_codec_by_name() -> None:
    assert make_codec("none") is None
    assert codec("fp8").name == "fp8-head"
    assert codec("k=int4/64,v=int2/32").name == "k=int4/64,v=int2/32"
    with pytest.raises(ConfigError, match="no scheme 'int5'"):
        make_codec("int5")


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_torch("values are quantised")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"values are quantised to int8 with torch: pip install '\.\[hbm\]'"):
        make_codec("int8")
    assert make_codec("none") is None
