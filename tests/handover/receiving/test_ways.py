"""Promises of `choose_way` in part_receiver.py: the way of bytes between two ranks, and the error if none exists."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvstore.handover.config import HandoverSettings
from kvstore.handover.description import RankInfo
from kvstore.handover.receiving.part_receiver import choose_way
from kvstore.handover.resources import RankResources
from kvstore.kvcache.layouts.formatter import remap
from kvstore.protocol.errors import ConfigError, KVStoreError, Unreachable
from kvstore.protocol.handover_messages import PULL, PUSH
from kvstore.protocol.settings import Size
from tests.handover.scene import Rank, layout_of

Make = Callable[..., Rank]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes ranks, and closes them."""
    with ExitStack() as stack:

        def one(transports: str = "tcp", *, way: str = "auto", direct_min_bytes: int = 0, **how: Any) -> Rank:
            settings = HandoverSettings(way=way, direct_min_bytes=Size(direct_min_bytes))
            rank = Rank(layout_of(), 0, settings, transports=transports, **how)
            stack.callback(rank.close)
            return rank

        yield one


def resources_of(rank: Rank) -> RankResources:
    resources: RankResources = rank.transceiver._requests.resources
    return resources


def info_of(rank: Rank, **changes: Any) -> RankInfo:
    [info] = rank.transceiver.connect([rank.transceiver.describe()]).ranks
    return dataclasses.replace(info, **changes)


def chosen(receiver: Rank, info: RankInfo) -> tuple[int, bool]:
    """The way, and whether parts are gathered."""
    way = choose_way(resources_of(receiver), info, remap(info.layout, receiver.layout))
    return way.way, bool(way.part_bytes)


@pytest.mark.parametrize(
    ("ours", "theirs", "way"),
    [
        ({}, {}, (PUSH, False)),
        ({"direct_min_bytes": 1 << 20}, {}, (PUSH, True)),
        ({"transports": "shm,tcp"}, {"transports": "shm,tcp"}, (PULL, False)),
        ({"transports": "shm,tcp", "way": "push"}, {"transports": "shm,tcp"}, (PUSH, False)),
        ({"way": "pull"}, {}, (PULL, False)),
        ({"transports": "shm"}, {"transports": "shm", "is_shared": False}, (PULL, True)),
    ],
)
def test_the_way_is_what_both_have_and_the_settings_want(
    make: Make, ours: dict[str, Any], theirs: dict[str, Any], way: tuple[int, bool]
) -> None:
    assert chosen(make(**ours), info_of(make(**theirs))) == way


@pytest.mark.parametrize(
    ("ours", "theirs", "error", "complaint"),
    [
        ({}, {"transports": "shm"}, Unreachable, "no common transport with"),
        ({"transports": "shm", "way": "push"}, {"transports": "shm"}, ConfigError, "set way to auto or pull"),
    ],
)
def test_impossible_mode_names_the_remedy(
    make: Make, ours: dict[str, Any], theirs: dict[str, Any], error: type[KVStoreError], complaint: str
) -> None:
    receiver, sender = make(**ours), make(**theirs)
    with pytest.raises(error, match=complaint):
        chosen(receiver, info_of(sender))
