"""Promises of identity.py."""

import pytest

from kvstore.security.identity import ANONYMOUS, UNAUTHENTICATED, Identity, IdentityKind, Role


@pytest.mark.parametrize(("name", "asked", "is_it"), [("n1", "n1", True), ("n1", "n2", False), ("", "n2", True)])
def test_a_node_goes_by_the_name_of_its_credential_or_by_any(name: str, asked: str, is_it: bool) -> None:
    assert Identity(IdentityKind.NODE, name=name).may_use_name(asked) is is_it
    assert ANONYMOUS.may_use_name(asked)


def test_only_the_tenant_acts_as_it_and_only_admins_operate() -> None:
    red, ruler, operator = (
        Identity(IdentityKind.TENANT, Role.WRITE, "red"),
        Identity(IdentityKind.TENANT, Role.ADMIN, "red"),
        Identity(IdentityKind.OPERATOR, Role.ADMIN),
    )
    assert [
        who.is_tenant("red") for who in (red, ruler, ANONYMOUS, operator, UNAUTHENTICATED, Identity(IdentityKind.NODE, name="red"))
    ] == [True] * 3 + [False] * 3
    assert not red.is_tenant("blue")
    assert [who.is_admin for who in (ruler, operator, ANONYMOUS, red, UNAUTHENTICATED)] == [True] * 3 + [False] * 2
