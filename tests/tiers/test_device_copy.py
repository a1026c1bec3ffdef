"""Copies to and from a device, and how a batch is cut into runs that fit into pinned memory."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ConfigError
from kvstore.tiers.hbm import PlainCopier, import_torch, runs


def test_plain_copies_go_to_their_offsets_and_back() -> None:
    arena = torch.zeros(20, dtype=torch.uint8)
    copier = PlainCopier(arena)
    copier.write([(15, b"abc"), (2, memoryview(b"xy"))])
    assert bytes(arena.tolist()) == b"\0\0xy" + bytes(11) + b"abc\0\0"
    target = bytearray(4)
    copier.read([(14, memoryview(target))])
    assert target == b"\0abc"


@given(sizes=st.lists(st.integers(1, 30), max_size=12), limit_bytes=st.integers(1, 20))
def test_runs_carry_every_byte_once_in_order_and_only_the_last_is_short(sizes: list[int], limit_bytes: int) -> None:
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    whole = np.arange(sum(sizes), dtype=np.uint16).astype(np.uint8)
    pieces = [(end - size, whole[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    cut = list(runs(pieces, limit_bytes))
    lengths = [sum(len(part) for _, part in run) for run in cut]
    assert all(length == limit_bytes for length in lengths[:-1])
    assert all(0 < length <= limit_bytes for length in lengths)
    copy = np.zeros_like(whole)
    for run in cut:
        for offset, part in run:
            copy[offset : offset + len(part)] += part
    assert (copy == whole).all()
    assert sum(lengths) == len(whole)


def test_torch_is_imported_where_it_is_installed() -> None:
    assert import_torch() is torch


def test_without_torch_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[hbm\]'"):
        import_torch()
