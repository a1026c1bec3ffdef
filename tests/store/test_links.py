"""Tests of MasterConnections: every partition's master gets the newest description, in any order."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.master_session.master_link import MasterLink
from kvstore.store.master_session.master_session import MasterConnections, MasterSession


@dataclass
class Link:
    """Notes what it is asked to do."""

    partition: int
    done: list[str] = field(default_factory=list)
    told: dict[str, bytes] = field(default_factory=dict)

    def describe(self, **told: bytes) -> None:
        self.told |= told

    @property
    def is_started(self) -> bool:
        return "start" in self.done

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.done.append(name)


@pytest.fixture
def made() -> list[Link]:
    return []


@pytest.fixture
def links(made: list[Link]) -> MasterConnections:
    def make_link(partition: int, _session: MasterSession) -> MasterLink:
        made.append(Link(partition))
        return cast(MasterLink, made[-1])

    return MasterConnections(
        PartitionMap(), make_session=lambda _: cast(MasterSession, Link(0)), make_link=make_link, on_partitioned=lambda: None
    )


def test_a_new_node_id_renews_the_other_links(links: MasterConnections, made: list[Link]) -> None:
    links.registered(2, 7)
    links.registered(2, 7)
    assert made[1].done == ["start"]
    links.registered(2, 8)
    assert (links.node_id, made[0].done, made[1].done) == (8, [], ["start", "renew"])
    with pytest.raises(ConfigError, match="restart the node"):
        links.registered(4, 9)
    assert links.node_id == 8


def test_links_that_failed_to_start_are_retried(links: MasterConnections, made: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[None] = []
    monkeypatch.setattr(links, "_on_partitioned", lambda: cuts.append(None))

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(links, "_make_session", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            links.registered(3, 7)
    with monkeypatch.context() as patch:
        patch.setattr(Link, "start", fail, raising=False)
        with pytest.raises(RuntimeError, match="new thread"):
            links.registered(3, 7)
    assert [link.done for link in made] == [[], [], []]
    for _ in range(2):
        links.registered(3, 7)
        assert [link.done for link in made] == [[], ["start"], ["start"]]
    assert len(cuts) == 1
    links.lost(2, 5)
    assert made[2].done == ["start", "lost"]
