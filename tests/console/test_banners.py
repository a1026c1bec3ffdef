"""Promises of banners.py: each trouble has what, since when and what to do; the worst comes first."""

from typing import Any

import pytest

from kvstore.console.banners import ERROR, WARNING, Banner, Banners, find_banners, unreachable
from kvstore.protocol import control_pb2 as pb

LIVE = pb.NodeStatus(name="n", state="alive")
OWNED: dict[str, Any] = {"role": "owner", "catalog_health": "ok", "owner": pb.CatalogOwner(name="m"), "nodes": [LIVE]}


def node(name: str, state: str = "alive", **facts: Any) -> pb.NodeStatus:
    return pb.NodeStatus(name=name, state=state, **facts)


def failing(name: str, health: str = "gone") -> pb.NodeStatus:
    return node(name, tiers=[pb.TierStatus(name="dram", health="ok"), pb.TierStatus(name="nvme", health=health)])


def found(missing: tuple[str, ...] = (), shares: dict[str, int] | None = None, **facts: Any) -> list[Banner]:
    return find_banners(pb.StatusReply(**(OWNED | facts)), missing, shares or {})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, []),
        ({"role": "following"}, []),
        ({"role": "following", "owner": None, "nodes": []}, [(ERROR, "No master owns the catalog", "activity")]),
        ({"role": "cut off"}, [(ERROR, "This master is cut off from its catalog", "activity")]),
        ({"catalog_health": "no space"}, [(ERROR, "Catalog: no space", "overview")]),
        ({"nodes": [node("n", "dead")]}, [(ERROR, "n is dead", "nodes?state=dead")]),
        ({"nodes": [node("p", "dead"), node("o", "dead"), LIVE]}, [(ERROR, "2 nodes (o, p) are dead", "nodes?state=dead")]),
        (
            {"nodes": [*(node(f"d{at}", "dead") for at in range(7)), LIVE]},
            [(ERROR, "7 nodes (d0, d1, d2, d3, d4 and 2 more) are dead", "nodes?state=dead")],
        ),
        ({"nodes": [failing("n")]}, [(WARNING, "A tier of n failed: nvme: gone", "nodes?state=failed")]),
        (
            {"nodes": [failing("n"), failing("o", "suspended: no space left")]},
            [
                (WARNING, "A tier of n failed: nvme: gone", "nodes?state=failed"),
                (WARNING, "A tier of o takes no values: nvme: suspended: no space left", "nodes?state=failed"),
            ],
        ),
        (
            {"nodes": [failing("n"), failing("o"), failing("p")]},
            [(WARNING, "A tier of n, and of 2 more nodes, failed: nvme: gone", "nodes?state=failed")],
        ),
        (
            {"nodes": [node("n", drain=pb.DrainStatus(lacks_space=True, remaining_blocks=2))]},
            [(WARNING, "No node has free space for the rest of n's drain", "nodes?state=draining")],
        ),
        ({"nodes": []}, [(WARNING, "No node has joined yet", "nodes")]),
        (
            {
                "name": "m1",
                "expirations": [
                    pb.Expiration(what="token of tenant red", left_s=-1),
                    pb.Expiration(what="certificate tls_cert", left_s=9e5),
                ],
            },
            [
                (ERROR, "Token of tenant red has expired", "overview"),
                (WARNING, "Certificate tls_cert of m1 expires in 10 days", "overview"),
            ],
        ),
        (
            {"expirations": [pb.Expiration(what="token of node n1", left_s=90_000)]},
            [(WARNING, "Token of node n1 expires in 25 hours", "overview")],
        ),
    ],
)
def test_a_trouble_has_a_level_a_text_and_a_view(facts: dict[str, Any], expected: list[tuple[str, str, str]]) -> None:
    told = found(**facts)
    assert [(one.level, one.text, one.view) for one in told] == expected
    assert all(one.todo for one in told)


def test_partitions_without_an_owner_are_counted() -> None:
    owners = [pb.CatalogOwner(name=name) for name in ("m1", "", "", "m1")]
    (one,) = found(shares={"m1": 2}, partitions=4, owners=owners)
    assert (one.level, one.text) == (ERROR, "No master owns 2 of the 4 partitions")
    assert found(shares={"m1": 4}, partitions=4, owners=owners) == []


@pytest.mark.parametrize(
    ("catalog", "health", "todo"),
    [
        ("etcd://e:2379", "etcd is full (alarm NOSPACE)", "Compact and defragment etcd"),
        ("etcd://e:2379", "no quorum", "etcdctl endpoint health"),
        ("lmdb:/var/lib/kvstore", "no space left on device", "Check the disk of the master"),
    ],
)
def test_what_to_do_about_the_catalog_is_by_its_kind(catalog: str, health: str, todo: str) -> None:
    (one,) = found(catalog=catalog, catalog_health=health)
    assert todo in one.todo


def test_a_catalog_in_trouble_is_the_cause_and_told_once() -> None:
    for role in ("cut off", "following"):
        assert [one.kind for one in found(role=role, owner=None, catalog_health="no quorum")] == ["catalog"]


def test_banners_silent_master_is_one_problem() -> None:
    first, second = (
        found((f"m2 at m2:1, which owns the catalog, does not answer: timeout; what is shown of it is {age} s old",))[0] for age in (3, 4)
    )
    assert first.text == "m2 at m2:1, which owns the catalog, does not answer"
    assert first.kind == second.kind
    assert second.detail == "timeout; what is shown of it is 4 s old"


def test_the_worst_come_first_each_with_since_when() -> None:
    banners = Banners()
    warning, error = Banner(WARNING, "w", "w", "do", "nodes"), Banner(ERROR, "e", "e", "do", "nodes", age_s=30.0)
    assert [(one["kind"], one["since_s"], one["is_older"]) for one in banners.of([warning, error], 1000.0)] == [
        ("e", 970.0, False),
        ("w", 1000.0, True),
    ]
    later = Banner(WARNING, "new", "new", "do", "nodes")
    assert [(one["kind"], one["since_s"], one["is_older"]) for one in banners.of([warning, later], 1010.0)] == [
        ("w", 1000.0, True),
        ("new", 1010.0, False),
    ]


def test_a_trouble_that_ended_and_returns_is_a_new_one() -> None:
    banners, one = Banners(), unreachable("no master answers")
    banners.of([], 1.0)
    assert [banners.of(found, at)[0]["since_s"] for at, found in ((2.0, [one]), (3.0, [one]))] == [2.0, 2.0]
    banners.of([], 4.0)
    assert banners.of([one], 5.0)[0]["since_s"] == 5.0
