"""Promises of tokens.py."""

import hashlib

import pytest

from kvstore.protocol.errors import Unauthorized
from kvstore.protocol.tokens import check_node_pass, check_token, node_pass

DIGESTS = {"red": hashlib.sha256(b"secret").digest()}


def test_the_right_token_opens_and_without_digests_anything_does() -> None:
    check_token(DIGESTS, "red", "secret")
    check_token({}, "anyone", "")


@pytest.mark.parametrize(("tenant", "token"), [("red", "wrong"), ("red", ""), ("blue", "secret"), ("blue", "")])
def test_an_unknown_tenant_and_a_wrong_token_are_refused_alike(tenant: str, token: str) -> None:
    with pytest.raises(Unauthorized, match=f"^unknown tenant '{tenant}' or wrong token$"):
        check_token(DIGESTS, tenant, token)


def test_a_node_shows_a_pass_that_is_not_the_digest_and_opens_one_tenant_at_one_node_under_one_master() -> None:
    digests = DIGESTS | {"blue": hashlib.sha256(b"other").digest()}
    shown = node_pass(digests, "red", master_epoch=3, source=7)
    check_node_pass(digests, "red", shown, master_epoch=3, source=7)
    assert shown != DIGESTS["red"].hex()
    for tenant, master_epoch, source in (("blue", 3, 7), ("red", 4, 7), ("red", 3, 8)):
        with pytest.raises(Unauthorized, match=f"^this is no pass for tenant '{tenant}' at node {source} under master {master_epoch}$"):
            check_node_pass(digests, tenant, shown, master_epoch=master_epoch, source=source)


@pytest.mark.parametrize("shown", ["", "secret", DIGESTS["red"].hex(), "\u00e9"], ids=["nothing", "token", "digest", "not ASCII"])
def test_neither_a_token_nor_its_digest_is_a_pass(shown: str) -> None:
    with pytest.raises(Unauthorized):
        check_node_pass(DIGESTS, "red", shown, master_epoch=1, source=1)


def test_a_tenant_without_a_digest_has_no_pass_and_without_digests_none_is_needed() -> None:
    with pytest.raises(Unauthorized, match=r"^no token of tenant 'blue' is known here$"):
        node_pass(DIGESTS, "blue", master_epoch=1, source=1)
    with pytest.raises(Unauthorized):
        check_node_pass(DIGESTS, "blue", "", master_epoch=1, source=1)
    assert node_pass({}, "red", master_epoch=1, source=1) == ""
    check_node_pass({}, "red", "anything", master_epoch=1, source=1)
