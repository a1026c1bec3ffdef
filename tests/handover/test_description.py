"""Promises of description.py: a rank's description comes back as it was, and nothing else is taken for one."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handover.description import RankInfo, RemoteExecutor, executor, unpack
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.rpc.address import Address
from tests.handover.scene import layout_of

INFO = RankInfo(
    instance=bytes(range(16)),
    rank=3,
    control=Address(host="::1", port=7450),
    layout=layout_of(tp=4, dp=2),
    engine=b"engine",
    host="boot",
    is_shared=True,
)


def test_a_description_comes_back_as_it_was() -> None:
    assert unpack(INFO.pack()) == INFO
    plain = dataclasses.replace(INFO, is_shared=False, engine=b"", host="", control=Address(host="10.0.0.1", port=1))
    assert unpack(plain.pack()) == plain
    assert (INFO.dp, plain.dp) == (1, 1)


def test_a_description_cut_anywhere_or_too_long_is_refused() -> None:
    data = INFO.pack()
    for wrong in [data[:end] for end in range(len(data))] + [data + b"\0"]:
        with pytest.raises(ProtocolError):
            unpack(wrong)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_gives_a_description_or_a_protocol_error(at: int, value: int) -> None:
    data = bytearray(INFO.pack())
    data[at % len(data)] = value
    try:
        unpack(bytes(data))
    except ProtocolError:
        return


@pytest.mark.parametrize("wrong", [dataclasses.replace(INFO, rank=4), dataclasses.replace(INFO, control=Address(host="", port=1))])
def test_a_rank_that_cannot_be_is_refused(wrong: RankInfo) -> None:
    with pytest.raises(ProtocolError, match="description is invalid"):
        unpack(wrong.pack())


def test_an_executor_is_all_its_ranks_in_any_order() -> None:
    infos = [dataclasses.replace(INFO, rank=rank, instance=bytes([rank] * 16)) for rank in range(4)]
    packed = [info.pack() for info in infos]
    assert executor(packed[::-1]) == RemoteExecutor(tuple(infos))
    assert executor(packed).layout == INFO.layout
    other = dataclasses.replace(infos[0], layout=layout_of(tp=4)).pack()
    for wrong, complaint in (
        ([], "at least one"),
        (packed[1:], "were described"),
        (packed + packed[:1], "were described"),
        ([other, *packed[1:]], "different layouts"),
    ):
        with pytest.raises(InvalidArgument, match=complaint):
            executor(wrong)
