"""Descriptions of engines and regions round-trip; anything else is a ProtocolError and nothing worse."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.transfer.agent import Rail
from kvstore.transfer.description import (
    MAX_AGENTS,
    MAX_DESCRIPTION_BYTES,
    MAX_REGION_DESCRIPTION_BYTES,
    AgentInfo,
    EngineInfo,
    pack_engine,
    pack_region,
    unpack_engine,
    unpack_region,
)
from kvstore.transfer.memory.region import RemoteRegion

AGENT = AgentInfo("tcp", Rail("eth0", "192.0.2.1", 1, 25.0), b"\0meta\xff")
ENGINE = EngineInfo("me", "boot-id", (AGENT, AgentInfo("shm", Rail(), b"")), {"cpu:0": (("eth0",), ()), "cuda:1": ((), ("eth0", "eth1"))})
REGION = RemoteRegion(7, 1 << 40, (1 << 63) - 1, {"shm": b"\1\0\0\0", "tcp": b""}, "cuda:3")
U64 = st.integers(0, (1 << 64) - 1)
NAMES = st.text(max_size=60).filter(lambda text: len(text.encode()) < 256)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


def test_an_engine_comes_back_as_it_was() -> None:
    assert unpack_engine(pack_engine(ENGINE)) == ENGINE
    assert unpack_engine(pack_engine(EngineInfo("x", ""))) == EngineInfo("x", "")


def test_the_secret_is_described_and_not_logged() -> None:
    engine = EngineInfo("x", "", secret=b"\1\2")
    assert unpack_engine(pack_engine(engine)).secret == b"\1\2"
    assert "secret" not in repr(engine)
    with pytest.raises(ProtocolError):
        unpack_engine(pack_engine(engine).replace(b'"0102"', b'"xy"'))


@given(U64, U64.filter(bool), U64, st.dictionaries(NAMES, st.binary(max_size=50), max_size=4), NAMES)
def test_a_region_comes_back_as_it_was(region_id: int, size: int, key: int, descriptors: dict[str, bytes], location: str) -> None:
    region = RemoteRegion(region_id, size, key, descriptors, location)
    assert unpack_region(pack_region(region)) == region


def described(**changes: Any) -> bytes:
    return json.dumps({**json.loads(pack_engine(ENGINE)), **changes}).encode()


def with_agent(**changes: Any) -> bytes:
    entry = json.loads(pack_engine(ENGINE))["agents"][0]
    return described(agents=[{**entry, **changes}])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 50_000,
        b"[" * MAX_DESCRIPTION_BYTES + b"[",
        described(kvstore_engine=2),
        described(kvstore_engine=[]),
        described(name=""),
        described(name="x" * 256),
        described(name="\ud800"),
        described(host=5),
        described(agents={}),
        described(agents=[5]),
        described(agents=json.loads(pack_engine(ENGINE))["agents"][:1] * (MAX_AGENTS + 1)),
        described(matrix=[]),
        described(matrix={"cpu:0": [["eth0"]]}),
        described(matrix={"cpu:0": "ab"}),
        described(matrix={"cpu:0": [[5], []]}),
        with_agent(address="here"),
        with_agent(address="fe80::1%eth0"),
        with_agent(address="fe80::1%\0"),
        with_agent(address=5),
        with_agent(device=None),
        with_agent(numa_node=math.inf),
        with_agent(numa_node="x"),
        with_agent(speed_gbit_s=math.nan),
        with_agent(speed_gbit_s=math.inf),
        with_agent(speed_gbit_s=-1),
        with_agent(speed_gbit_s=10**400),
        with_agent(metadata="?"),
        with_agent(metadata=5),
        with_agent(metadata="ä"),
    ],
)
def test_what_is_no_engine_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_engine(data)


def test_another_version_is_named() -> None:
    with pytest.raises(ProtocolError, match="version 2, this side reads 1"):
        unpack_engine(described(kvstore_engine=2))
    data = bytearray(pack_region(REGION))
    data[0] = 9
    with pytest.raises(ProtocolError, match="version 9, this side reads 1"):
        unpack_region(bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1",
        pack_region(REGION)[:-1],
        pack_region(REGION) + b"x",
        pack_region(REGION._replace(size_bytes=0)),
        pack_region(REGION).replace(b"cuda:3", b"cuda\xff3"),
        pack_region(REGION).replace(b"tcp", b"\xffcp"),
        bytes(MAX_REGION_DESCRIPTION_BYTES + 1),
    ],
)
def test_what_is_no_region_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_region(data)


@given(st.data(), st.sampled_from([pack_engine(ENGINE), pack_region(REGION)]))
def test_corrupted_descriptions_parse_or_raise_protocol_error(data: st.DataObject, packed: bytes) -> None:
    changed = bytearray(packed)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for unpack in (unpack_engine, unpack_region):
        try:
            unpack(bytes(changed))
        except ProtocolError:
            continue


@given(
    st.sampled_from(["kvstore_engine", "name", "host", "agents", "matrix"]),
    st.sampled_from(["transport", "device", "address", "numa_node", "speed_gbit_s", "metadata"]),
    JSON,
)
def test_values_of_any_type_are_read_or_a_protocol_error(field: str, agent_field: str, value: Any) -> None:
    for data in (described(**{field: value}), with_agent(**{agent_field: value})):
        try:
            info = unpack_engine(data)
        except ProtocolError:
            continue
        pack_engine(info)
