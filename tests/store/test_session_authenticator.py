"""Tests of session_authenticator.py with real tickets, stub sessions and a fake clock: admission, and when sessions
end."""

from dataclasses import replace
from typing import Any

import pytest

from kvstore.protocol.errors import InvalidTicket, StaleEpoch, Unavailable
from kvstore.protocol.frames import VERSION
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, Hello
from kvstore.security.identity import Identity, IdentityKind, Role
from kvstore.security.tickets.issuer import PASS_TTL_S, Issuer
from kvstore.store.session_authenticator import SessionAuthenticator

S = 10**9
RED = Identity(IdentityKind.TENANT, Role.WRITE, "red", "one")
GRACE_S, TICKET_S = 1000.0, 100.0


class Connection:
    """As far as an Admission sees a Session."""

    def __init__(self, peer_version: int = VERSION) -> None:
        self.peer_version = peer_version
        self.closed = ""

    def close(self, reason: str) -> None:
        self.closed = reason

    @property
    def is_open(self) -> bool:
        return not self.closed


class Scene:
    """A node, and masters that issue tickets for it."""

    def __init__(self) -> None:
        self.now_ns = 5 * S
        self.revoked: set[bytes] = set()
        self.hidden: list[str] = []
        self.authenticator = SessionAuthenticator(
            clock_ns=lambda: self.now_ns, grace_s=GRACE_S, is_revoked=self.revoked.__contains__, on_revoked=self.hidden.append
        )
        self.numbers = iter(range(1, 1000))
        self.issuer = self.new_master("first")

    def new_master(self, name: str, *, epoch: int = 1, needs_tickets: bool = True) -> Issuer:
        issuer = Issuer(ticket_ttl_s=TICKET_S, key_ttl_s=1e6, random_bytes=lambda size: next(self.numbers).to_bytes(size, "little"))
        key = issuer.register(7, self.now_ns)
        self.authenticator.registered(node_id=7, master_epoch=epoch, issuer=name, needs_tickets=needs_tickets)
        if needs_tickets:
            self.authenticator.add_key(key.key_id, key.secret, age_ms=0)
        return issuer

    def ticket(self, bearer: Identity = RED) -> bytes:
        return self.issuer.issue_ticket(7, bearer, left_s=1e6, now_ns=self.now_ns)

    def hello(self, ticket: bytes | None = None, **fields: Any) -> Hello:
        return Hello(**{"role": ROLE_CLIENT, "tenant": "red", "ticket": self.ticket() if ticket is None else ticket, **fields})

    def enter(self, hello: Hello | None = None) -> Connection:
        connection = Connection()
        self.authenticator.admit(connection, hello or self.hello())  # type: ignore[arg-type]
        return connection

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * S)
        self.authenticator.expire()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def admit(scene: Scene, hello: Hello, version: int = VERSION) -> Any:
    return scene.authenticator.admit(Connection(version), hello)  # type: ignore[arg-type]


def test_a_ticket_identifies_its_tenant_until_it_expires(scene: Scene) -> None:
    caller = admit(scene, scene.hello())
    assert caller.identity == Identity(IdentityKind.TENANT, Role.WRITE, "red")
    assert (caller.tenant, caller.until_ns, caller.issuer, caller.blocks) == ("red", scene.now_ns + TICKET_S * S, "first", None)


def test_a_ticket_for_another_tenant_or_role_is_refused(scene: Scene) -> None:
    node_pass = scene.issuer.issue_pass(7, "red", [b"a"], [1], scene.now_ns)
    for hello in (scene.hello(tenant="blue"), scene.hello(role=ROLE_NODE, epoch=1), scene.hello(node_pass)):
        with pytest.raises(InvalidTicket, match="ticket is not valid for tenant"):
            admit(scene, hello)
    with pytest.raises(StaleEpoch):
        admit(scene, scene.hello(node_pass, role=ROLE_NODE, epoch=2))
    assert len(scene.authenticator) == 0


def test_a_session_outlives_its_ticket_while_linked(scene: Scene) -> None:
    connection, ticket = scene.enter(), scene.ticket()
    scene.wait(50 * TICKET_S)
    assert connection.is_open
    with pytest.raises(InvalidTicket, match="has expired"):
        scene.enter(scene.hello(ticket))


def test_sessions_end_after_the_grace_period_without_a_link(scene: Scene) -> None:
    connection = scene.enter()
    scene.authenticator.link_down()
    scene.wait(GRACE_S - 1)
    scene.enter()
    assert connection.is_open
    scene.wait(1)
    assert connection.closed == "no link to the master for 1000 s (ticket_grace_s)"
    with pytest.raises(Unavailable, match="has had no link to its master for 1000 s"):
        scene.enter()
    scene.issuer = scene.new_master("first")
    assert scene.enter().is_open


@pytest.mark.promise("authentication")
def test_a_session_of_a_former_master_ends_with_its_ticket(scene: Scene) -> None:
    before, ticket = scene.enter(), scene.ticket()
    scene.authenticator.link_down()
    scene.issuer = scene.new_master("second", epoch=2)
    with_old, with_new = scene.enter(scene.hello(ticket)), scene.enter()
    scene.wait(TICKET_S - 1)
    assert before.is_open
    scene.wait(1)
    assert before.closed == with_old.closed == "its ticket expired"
    assert with_new.is_open
    assert len(scene.authenticator) == 1


@pytest.mark.promise("authentication")
def test_a_pass_session_ends_with_its_pass(scene: Scene) -> None:
    shown = scene.issuer.issue_pass(7, "red", [b"a"], [1], scene.now_ns)
    caller = admit(scene, hello := scene.hello(shown, role=ROLE_NODE, name="n2", epoch=1))
    assert caller.identity == Identity(IdentityKind.NODE, name="n2")
    caller.check_blocks([b"a"], [1])
    connection = scene.enter(hello)
    scene.wait(PASS_TTL_S)
    assert connection.closed == "its ticket expired"


def test_revoke_ends_only_sessions_of_the_credentials(scene: Scene) -> None:
    other = Identity(IdentityKind.TENANT, Role.READ, "red", "two")
    blue = Identity(IdentityKind.TENANT, Role.READ, "blue", "one")
    ticket = scene.ticket()
    sessions = [scene.enter(), scene.enter(scene.hello(scene.ticket(other))), scene.enter(scene.hello(scene.ticket(blue), tenant="blue"))]
    assert scene.authenticator.revoke("red", {scene.issuer.revoke(RED, scene.now_ns)}) == 1
    assert [one.closed for one in sessions] == ["its credential was revoked", "", ""]
    with pytest.raises(InvalidTicket, match="the token of this ticket was revoked"):
        scene.enter(scene.hello(ticket))


def test_revoke_ends_all_former_master_sessions_of_the_tenant(scene: Scene) -> None:
    before = scene.enter()
    blue = Identity(IdentityKind.TENANT, Role.READ, "blue", "one")
    other = scene.enter(scene.hello(scene.ticket(blue), tenant="blue"))
    scene.issuer = scene.new_master("second", epoch=2)
    assert scene.authenticator.revoke("red", {4711}) == 1
    assert (before.closed, other.closed) == ("its credential was revoked", "")


def test_each_partition_has_its_own_master_and_tickets() -> None:
    scene = Scene()
    other = Issuer(ticket_ttl_s=TICKET_S, key_ttl_s=1e6, random_bytes=lambda size: next(scene.numbers).to_bytes(size, "little"))
    key = other.register(7, scene.now_ns)
    scene.authenticator.registered(node_id=7, master_epoch=9, issuer="second", needs_tickets=True, partition=1)
    scene.authenticator.add_key(key.key_id, key.secret, age_ms=0, partition=1)
    first = scene.enter()
    fetched = other.issue_pass(7, "red", [b"a"], [1], scene.now_ns)
    with pytest.raises(StaleEpoch, match="under master epoch 9, this node under epoch 1"):
        scene.enter(scene.hello(fetched, role=ROLE_NODE, name="n", epoch=9))
    for partition, epoch in ((0, 1), (2, 0)):
        with pytest.raises(InvalidTicket, match="key is unknown"):
            scene.enter(scene.hello(fetched, role=ROLE_NODE, name="n", epoch=epoch, partition=partition))
    second = scene.enter(scene.hello(fetched, role=ROLE_NODE, name="n", epoch=9, partition=1))
    scene.authenticator.link_down(1)
    scene.now_ns += int(GRACE_S * S)
    scene.authenticator.expire()
    assert (first.is_open, second.is_open) == (True, False), "the pass has ended; partition 0's master is heard of"
    scene.authenticator.link_down()
    scene.now_ns += int(GRACE_S * S)
    scene.authenticator.expire()
    assert not first.is_open


def test_a_revoked_certificate_ends_the_sessions_of_its_tickets(scene: Scene) -> None:
    """For any issuer, and without a link: the node reads `tls_revoked` itself."""
    leaked, kept = (scene.hello(scene.ticket(replace(RED, certificate=name * 32))) for name in (b"l", b"k"))
    ended, going_on, by_token = scene.enter(leaked), scene.enter(kept), scene.enter()
    scene.authenticator.link_down()
    scene.revoked.add(b"l" * 32)
    scene.wait(1)
    assert ended.closed == "its certificate is revoked"
    assert going_on.is_open
    assert by_token.is_open
    assert scene.hidden == ["red"]
    with pytest.raises(InvalidTicket, match="the certificate of this ticket is revoked"):
        scene.enter(leaked)
    scene.enter(kept)
    scene.wait(1)
    assert scene.hidden == ["red"], "once"
