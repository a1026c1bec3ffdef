"""Values that say what they are: the header byte for byte, every scheme there and back, and what nodes make of them."""

import struct
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from xxhash import xxh3_64_intdigest

from kvstore.kvcache.codecs import codec, tensor_value
from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.codecs.tensor_value import HEADER_BYTES, TensorHeader, decode_value, encode_value, transcode
from kvstore.protocol.errors import InvalidArgument, ProtocolError

NAMES = ["none", "fp8-tensor", "fp8-head", "int8", "int8a", "int4/32", "int2/16", "k=int4/32,v=int2/16", "k=none,v=int8"]
names = pytest.mark.parametrize("name", NAMES)
HEADER = TensorHeader(
    scheme=CacheScheme.parse("k=int4/64,v=int2/32"), dtype="bfloat16", kv_factor=2, layers=3, heads=4, tokens=64, head_dim=128
)


def sample(layers: int = 2, kv: int = 2, heads: int = 3, tokens: int = 32, head_dim: int = 32) -> torch.Tensor:
    return torch.randn((layers, kv, heads, tokens, head_dim), generator=torch.Generator().manual_seed(8)).bfloat16()


def test_the_header_is_that_of_the_format() -> None:
    packed = HEADER.pack()
    head = struct.pack("<8s4B2H5I20x", b"\x93KVtens\n", 1, 2, 5, 6, 64, 32, 2, 3, 4, 64, 128)
    assert packed == head + struct.pack("<Q", xxh3_64_intdigest(head))
    assert len(packed) == HEADER_BYTES == 64


@pytest.mark.parametrize("buffer", [b"", b"\x93KVtens\n", bytes(64), b"x" * 4096])
def test_other_bytes_are_no_tensor_value(buffer: bytes) -> None:
    assert TensorHeader.unpack(buffer) is None


def damaged(**fields: int) -> bytes:
    """A header with the fields of the format so changed, and the digest of that."""
    head = bytearray(HEADER.pack()[:56])
    places = {"version": 8, "dtype": 9, "k_kind": 10, "v_kind": 11, "k_group": 12, "kv_factor": 16, "layers": 20}
    for name, number in fields.items():
        head[places[name]] = number
    return bytes(head) + struct.pack("<Q", xxh3_64_intdigest(bytes(head)))


@pytest.mark.parametrize("at", [8, 17, 40, 63])
def test_a_damaged_header_is_refused(at: int) -> None:
    packed = bytearray(HEADER.pack())
    packed[at] ^= 1
    with pytest.raises(ProtocolError, match="digest"):
        TensorHeader.unpack(packed)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"version": 2}, "version 2: this side reads version 1"),
        ({"dtype": 99}, "malformed"),
        ({"k_kind": 99}, "malformed"),
        ({"v_kind": 3}, "malformed.*groups"),
        ({"k_group": 128}, "malformed.*multiple of 128"),
        ({"kv_factor": 3}, "malformed.*kv_factor"),
        ({"layers": 0}, "malformed.*layers"),
    ],
)
def test_a_header_that_cannot_be_is_refused(fields: dict[str, int], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        TensorHeader.unpack(damaged(**fields))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "int8"}, "there are float32"),
        ({"kv_factor": 0}, "kv_factor is 2 or 1"),
        ({"heads": 0}, "1 to 4294967295"),
        ({"layers": 2**32}, "1 to 4294967295"),
        ({"tokens": 32}, "multiple of 64"),
        ({"head_dim": 48}, "multiple of 32"),
    ],
)
def test_a_header_of_what_cannot_be_stored_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        replace(HEADER, **changes)


@names
@pytest.mark.parametrize("kv", [1, 2])
def test_a_value_is_its_records_and_decodes_as_they_do(name: str, kv: int) -> None:
    tensor, scheme = sample(kv=kv), CacheScheme.parse(name)
    value = encode_value(tensor, scheme)
    header = TensorHeader.unpack(value)
    assert header is not None
    assert header.shape == tensor.shape
    assert len(value) == header.value_bytes
    parts = [codec.encode(tensor[:, kv], scheme.of(kv == 0), is_key=kv == 0).flatten(1) for kv in range(header.kv_factor)]
    assert bytes(value[64:]) == torch.cat(parts, 1).numpy().tobytes()

    out = torch.zeros((2, 32, kv, 3, 32), dtype=torch.bfloat16).permute(0, 2, 3, 1, 4)
    decode_value(bytes(value), out)
    for at in range(kv):
        records = parts[at].unflatten(1, (3, -1))
        decoded = codec.decode(records, scheme.of(at == 0), is_key=at == 0, tokens=32, head_dim=32, dtype=torch.bfloat16)
        assert torch.equal(out[:, at], decoded)


def test_heads_are_taken_out_of_a_value_without_decoding() -> None:
    tensor, scheme = sample(layers=1, heads=4), CacheScheme.parse("k=int4/32,v=int8")
    value = bytes(encode_value(tensor, scheme))
    one = bytes(encode_value(tensor[:, :, 2:3], scheme))
    header = TensorHeader.unpack(value)
    assert header is not None
    k, v = header.record_bytes(True), header.record_bytes(False)
    assert one[64:] == value[64 + 2 * k : 64 + 3 * k] + value[64 + 4 * k + 2 * v : 64 + 4 * k + 3 * v]


@pytest.mark.parametrize("tensor", [sample()[0], sample().double(), sample().to(torch.int8)])
def test_a_tensor_that_is_no_cache_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(InvalidArgument, match=r"axes|no element type"):
        encode_value(tensor, NONE)


def test_finite_numbers_that_scales_cannot_hold_are_refused() -> None:
    tensor = sample()
    tensor[0, 0, 0, 0, 0] = 1e9
    with pytest.raises(InvalidArgument, match="use fp8-head"):
        encode_value(tensor, CacheScheme.parse("int4/32"))
    encode_value(tensor, CacheScheme.parse("fp8-head"))
    tensor[0, 0, 0, 0, 0] = torch.nan
    out = torch.empty_like(tensor)
    decode_value(encode_value(tensor, CacheScheme.parse("int4/32")), out)
    assert out[0, 0, 0, 0, 0].isnan()
    tensor[1, 0, 0, 0, 0] = 1e9
    with pytest.raises(InvalidArgument, match="use fp8-head"):
        encode_value(tensor, CacheScheme.parse("int4/32"))


@pytest.mark.parametrize(
    ("out", "problem"), [(sample(heads=2), "does not go into"), (sample().half(), "bfloat16 .* does not go into float16")]
)
def test_a_value_goes_only_into_its_own_shape_and_dtype(out: torch.Tensor, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        decode_value(encode_value(sample(), NONE), out)


def test_what_is_no_whole_value_is_not_decoded() -> None:
    value = bytes(encode_value(sample(), NONE))
    with pytest.raises(InvalidArgument, match="do not begin with the header"):
        decode_value(b"x" * 100, sample())
    with pytest.raises(ProtocolError, match="but its header gives"):
        decode_value(value[:-1], sample())


@names
def test_a_node_makes_of_a_raw_value_what_a_client_would_have(name: str) -> None:
    tensor, scheme = sample(), CacheScheme.parse(name)
    made = transcode(bytes(encode_value(tensor, NONE)), scheme)
    if scheme.is_raw:
        assert made is None
    else:
        assert made is not None
        assert bytes(made) == bytes(encode_value(tensor, scheme))


def with_number(number: float) -> bytes:
    tensor = sample()
    tensor[1, 1, 2, 5, 6] = number
    return bytes(encode_value(tensor, NONE))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(b"x" * 4096, "int8", id="opaque"),
        pytest.param(damaged(version=2) + bytes(64), "int8", id="newer"),
        pytest.param(bytes(encode_value(sample(), CacheScheme.parse("int8"))), "int4/32", id="quantised"),
        pytest.param(bytes(encode_value(sample(), NONE))[:-2], "int8", id="cut short"),
        pytest.param(bytes(encode_value(sample(), NONE)), "int4/64", id="scheme cannot cut it"),
        pytest.param(bytes(encode_value(sample().to(torch.float8_e4m3fn), NONE)), "fp8-head", id="no smaller"),
        pytest.param(with_number(torch.inf), "fp8-head", id="infinite"),
        pytest.param(with_number(torch.nan), "int4/32", id="nan"),
        pytest.param(with_number(1e30), "int4/32", id="too large"),
    ],
)
def test_a_node_leaves_as_it_is_what_it_had_better_not_touch(value: bytes, name: str) -> None:
    assert transcode(value, CacheScheme.parse(name)) is None


def test_records_are_made_on_the_device_of_the_tensor() -> None:
    host = torch.empty((2, 8), dtype=torch.uint8)
    assert tensor_value._rows_on(torch.device("cpu"), host) is host
    assert tensor_value._rows_on(torch.device("meta"), host).device.type == "meta"


def test_headers_need_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without it reads what its values are."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "kvstore.kvcache.codecs.tensor_value")
    from kvstore.kvcache.codecs import tensor_value as again

    header = again.TensorHeader.unpack(HEADER.pack())
    assert header is not None
    assert header.value_bytes == HEADER.value_bytes
