"""Promises of tokens.py."""

import hashlib

import pytest

from kvstore.protocol.errors import Unauthorized
from kvstore.protocol.tokens import check_token

DIGESTS = {"red": hashlib.sha256(b"secret").digest()}


def test_the_right_token_opens_and_without_digests_anything_does() -> None:
    check_token(DIGESTS, "red", "secret")
    check_token({}, "anyone", "")


@pytest.mark.parametrize(("tenant", "token"), [("red", "wrong"), ("red", ""), ("blue", "secret"), ("blue", "")])
def test_an_unknown_tenant_and_a_wrong_token_are_refused_alike(tenant: str, token: str) -> None:
    with pytest.raises(Unauthorized, match=f"^unknown tenant '{tenant}' or wrong token$"):
        check_token(DIGESTS, tenant, token)
