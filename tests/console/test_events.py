"""Promises of events.py."""

from kvstore.console.events import ClusterEvent, ClusterEventLog, audited_event, differences, first
from kvstore.console.model import ConsoleModel, Document
from kvstore.protocol import control_pb2 as pb


def document(*nodes: pb.NodeStatus, role: str = "owner", owner: str = "m", epoch: int = 1, health: str = "ok") -> Document:
    status = pb.StatusReply(role=role, owner=pb.CatalogOwner(name=owner, epoch=epoch), catalog_health=health, nodes=nodes)
    return ConsoleModel().document(status, at_s=1, wall_s=1)


def node(name: str = "n", state: str = "alive", drain: bool | None = None, health: str = "ok") -> pb.NodeStatus:
    status = pb.DrainStatus(is_done=drain) if drain is not None else None
    return pb.NodeStatus(name=name, state=state, drain=status, tiers=[pb.TierStatus(name="nvme", health=health)])


def told(before: Document, after: Document) -> list[tuple[str, str]]:
    return [(event.level, event.text) for event in differences(before, after)]


def test_nodes_come_die_return_and_are_forgotten() -> None:
    none, alive, syncing, dead = document(), document(node()), document(node(state="syncing")), document(node(state="dead"))
    assert told(none, syncing) == [("info", "n has joined and is resyncing its inventory")]
    assert told(none, alive) == [("info", "n has joined and is in sync")]
    assert told(none, dead) == [("info", "n is in the catalog, and dead")]
    assert told(syncing, alive) == [("info", "n is in sync")]
    assert told(alive, dead) == [("error", "n is dead")]
    assert told(dead, syncing) == [("info", "n has joined and is resyncing its inventory")]
    assert told(alive, syncing) == [("info", "n has registered again and is resyncing its inventory")]
    assert told(dead, none) == [("info", "n is forgotten")]
    assert told(alive, alive) == []


def test_drains_and_failing_tiers() -> None:
    plain, draining, drained = document(node()), document(node(drain=False)), document(node(drain=True))
    assert told(plain, draining) == [("info", "n is being drained")]
    assert told(draining, drained) == [("info", "n is drained: it can be stopped")]
    assert told(drained, plain) == [("info", "n accepts blocks again")]
    failed = document(node(health="I/O error"))
    assert told(plain, failed) == [("warning", "n has a failed tier, nvme: I/O error")]
    assert told(failed, plain) == [("info", "n has no failed tier any more")]


def test_who_owns_the_catalog_and_how_it_is() -> None:
    assert told(document(), document(owner="o", epoch=2)) == [("warning", "o owns the catalog, epoch 2")]
    assert told(document(), document(owner="")) == [("error", "No master owns the catalog")]
    assert told(document(owner=""), document()) == [("info", "m owns the catalog, epoch 1")]
    assert told(document(), document(health="no space")) == [("error", "Catalog: no space")]
    assert told(document(health="no space"), document()) == [("info", "Catalog: ok")]


def test_a_log_begins_with_what_is() -> None:
    assert [event.text for event in first(document(node(), node("o", "dead")))] == [
        "The console has started: 1 of 2 nodes are alive",
        "o is dead",
        "m owns the catalog, epoch 1",
    ]
    assert len(list(first(document(owner="")))) == 1


def test_the_log_keeps_the_newest_and_numbers_them() -> None:
    log = ClusterEventLog(2)
    assert (log.last, log.after(0)) == (0, [])
    for text in "abc":
        log.add(ClusterEvent("info", "", text), 5.0)
    assert [(event["number"], event["text"], event["time_s"]) for event in log.after(0)] == [(5001, "b", 5.0), (5002, "c", 5.0)]
    assert [event["text"] for event in log.after(5001)] == ["c"]
    log.add(ClusterEvent("info", "", "of a clock that was set back"), 4.0)
    assert log.last == 5003


def test_events_of_new_process_follow_those_of_the_old() -> None:
    former, now = ClusterEventLog(500), ClusterEventLog(500)
    for second in range(400):
        former.add(ClusterEvent("info", "", "before"), 100.0 + second)
    now.add(ClusterEvent("error", "", "the first"), 600.0)
    assert [event["text"] for event in now.after(former.last)] == ["the first"]


def test_events_have_changed_partition_counts_of_masters() -> None:
    def shared(*owners: str) -> Document:
        status = pb.StatusReply(role="owner", partitions=len(owners), owners=[pb.CatalogOwner(name=name) for name in owners])
        return ConsoleModel().document(status, at_s=1, wall_s=1)

    assert told(shared("a", "b", "a"), shared("a", "b", "a")) == []
    assert told(shared("a", "b", "a"), shared("c", "c", "a")) == [
        ("info", "a owns 1 of 3 partitions"),
        ("warning", "b owns 0 of 3 partitions"),
        ("info", "c owns 2 of 3 partitions"),
    ]
    assert [event.text for event in first(shared("a", "b", "a"))][1:] == ["a owns 2 of 3 partitions", "b owns 1 of 3 partitions"]


def test_audit_entries_are_events_of_their_node() -> None:
    done = pb.AuditEntry(kind="operator", actor="alice", action="drain", target="node n1", result="done")
    assert audited_event(done) == ClusterEvent("info", "n1", "operator alice: drain node n1")
    refused = pb.AuditEntry(kind="unauthenticated", action="login", target="tenant red", result="refused")
    assert audited_event(refused) == ClusterEvent("warning", "", "unauthenticated: login tenant red, refused")
