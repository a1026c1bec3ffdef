"""Promises of permissions.py. tests/security/test_matrix.py checks that daemons enforce them."""

from collections.abc import Mapping

import pytest

from kvstore.protocol.errors import Denied, InvalidArgument, Unauthorized
from kvstore.protocol.handover_messages import (
    CancelRequest,
    ExportRegions,
    PartReady,
    RankHello,
    RankReport,
    ReadsDone,
    RequestCache,
    RequestEnded,
)
from kvstore.protocol.messages import MESSAGES, NO_REQUESTS
from kvstore.protocol.session_messages import Hello
from kvstore.security.identity import ANONYMOUS, MASTER, UNAUTHENTICATED, Identity, IdentityKind, Role
from kvstore.security.permissions import (
    COMMANDS,
    MASTER_FRAMES,
    MASTERS,
    NODE_FRAMES,
    OPEN,
    OPERATES,
    REPORTS,
    RPCS,
    Permission,
    allowed_frames,
    check,
    check_complete,
    denial,
)

READER, WRITER, ADMIN = (Identity(IdentityKind.TENANT, role, "red") for role in (Role.READ, Role.WRITE, Role.ADMIN))
OPERATOR, NODE, INSTANCE = (Identity(kind) for kind in (IdentityKind.OPERATOR, IdentityKind.NODE, IdentityKind.INSTANCE))
BETWEEN_RANKS = {
    kind.TYPE for kind in (RequestCache, ReadsDone, RankHello, PartReady, RankReport, ExportRegions, CancelRequest, RequestEnded)
}
"""Hand-over messages between engine ranks, never sent to a master or node."""


def test_every_request_has_a_rule_and_no_answer_has() -> None:
    requests = set(MESSAGES) - NO_REQUESTS - BETWEEN_RANKS
    assert set(MASTER_FRAMES) | set(NODE_FRAMES) == requests
    assert set(MASTER_FRAMES) & set(NODE_FRAMES) == {Hello.TYPE}


@pytest.mark.parametrize("frames", [MASTER_FRAMES, NODE_FRAMES], ids=["master", "node"])
def test_each_role_may_what_those_before_it_may(frames: Mapping[int, Permission]) -> None:
    assert (
        allowed_frames(frames, UNAUTHENTICATED)
        < allowed_frames(frames, READER)
        < allowed_frames(frames, WRITER)
        <= allowed_frames(frames, ADMIN)
    )
    assert allowed_frames(frames, ADMIN) < allowed_frames(frames, ANONYMOUS) | {
        number for number, rule in frames.items() if rule is COMMANDS
    }


def test_only_its_master_commands_a_node() -> None:
    commands = {number for number, rule in NODE_FRAMES.items() if rule is COMMANDS}
    assert commands <= allowed_frames(NODE_FRAMES, MASTER)
    for identity in (UNAUTHENTICATED, READER, WRITER, ADMIN, OPERATOR, NODE, INSTANCE, ANONYMOUS):
        assert not commands & allowed_frames(NODE_FRAMES, identity)


@pytest.mark.promise("authentication")
def test_what_is_served_without_a_rule_is_refused_by_name() -> None:
    check_complete(RPCS, ["/kvstore.v1.Control/Status"])
    with pytest.raises(InvalidArgument, match=r"^no rule in security/permissions.py for /kvstore.v1.Control/New, /x: add one$"):
        check_complete(RPCS, ["/kvstore.v1.Control/New", "/kvstore.v1.Control/Status", "/x"])


@pytest.mark.parametrize(
    ("rule", "identity", "error", "text"),
    [
        (OPERATES, UNAUTHENTICATED, Unauthorized, r"^a token of \[admins\], or a tenant's with role admin is needed to drain a node$"),
        (OPERATES, WRITER, Denied, r"^tenant 'red' with role write may not drain a node: it needs a token of \[admins\], or .*$"),
        (REPORTS, WRITER, Denied, r"instance's token"),
    ],
)
def test_who_may_not_is_told_what_it_needs(rule: Permission, identity: Identity, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check(rule, identity, "Drain")
    assert isinstance(denial(rule, identity, "Drain"), error)


def test_where_no_credentials_are_configured_everybody_may_all() -> None:
    for rule in set(RPCS.values()) - {MASTERS}:
        check(rule, ANONYMOUS, "it")
    with pytest.raises(Denied, match="another master"):
        check(MASTERS, ANONYMOUS, "RecordAudit")
    for rule in (OPEN, OPERATES):
        check(rule, ADMIN, "it")
