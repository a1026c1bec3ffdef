"""Promises of copying.py that its users' tests do not hold: which node gets a copy, and what it costs to find it."""

from kvstore.master.directory.copying import Copying, Pace, Receivers
from tests.master.blocks import Event, Master, Tier


class Scene:
    """Nodes with so much room, and the receivers of a step."""

    def __init__(self, **used_bytes: int) -> None:
        self.master = Master()
        directory = self.master.directory
        self.nodes = {name: self.master.register(name, 1, Tier(capacity_bytes=1000, used_bytes=used)) for name, used in used_bytes.items()}
        for node in self.nodes.values():
            self.master.sync(node, Event(b"k"))
        self.copying = Copying(*directory.columns(), directory.members, directory.replication, Pace())
        self.receivers = Receivers(self.copying, {node.node_id: node for node in self.nodes.values()})

    def choose(self, size_bytes: int = 100, *, has: str = "", hosts: str = "", last: str = "") -> str:
        """By the first letters of their names, which are their hosts."""
        ids = [[self.nodes[name].node_id for name in names] for names in (has, last)]
        node_id = self.receivers.choose(size_bytes, has=ids[0], hosts=list(hosts), last=ids[1])
        return next((name for name, node in self.nodes.items() if node.node_id == node_id), "")


def test_another_host_comes_first_then_who_got_the_last_one_then_who_has_most_room() -> None:
    scene = Scene(a=0, b=100, c=200)
    assert scene.choose() == "a"
    assert scene.choose(has="a") == "b"
    assert scene.choose(last="c") == "c"
    assert scene.choose(last="ca") == "a"
    assert scene.choose(hosts="c", last="c") == "a"
    assert scene.choose(hosts="abc", last="c") == "c"
    assert scene.choose(hosts="ab") == "c"
    assert scene.choose(has="ab", hosts="c") == "c"


def test_nobody_is_chosen_without_room() -> None:
    scene = Scene(a=0, b=900)
    assert scene.choose(has="a") == ""
    assert scene.choose(900, has="b") == "a"
    assert scene.choose(960) == "", "a part stays free"
    scene.copying.add("red", b"k", 900, node_id=scene.nodes["a"].node_id, source_node_id=scene.nodes["b"].node_id)
    assert scene.choose() == "", "it is on its way"
    assert Scene().choose() == ""


def test_nodes_are_looked_at_one_by_one_only_where_one_may_have_room_and_the_last_is_not_as_good_as_any() -> None:
    scene = Scene(a=0, b=0, c=0)
    scene.choose(last="b")
    scene.choose(1000)
    assert scene.receivers.looked_at == 0
    scene.choose(last="b", has="b")
    scene.choose(last="b", hosts="b")
    assert scene.receivers.looked_at == 6
    full = Scene(a=1000, b=1000)
    assert full.choose(1) == ""
    assert full.receivers.looked_at == 0
