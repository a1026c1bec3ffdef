"""Promises of access.py: without credentials only this host is let in, and no page of another site speaks through its reader's browser."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from kvstore.protocol.errors import ConfigError
from kvstore.security.authenticator import Authenticator
from kvstore.security.credentials import NO_TENANT
from kvstore.security.identity import UNAUTHENTICATED, Identity
from kvstore.telemetry.http.access import (
    AccessLevel,
    LocalAccess,
    OperatorAccess,
    TokenFileAccess,
    is_foreign,
)
from kvstore.telemetry.http.server import HttpServer
from tests.telemetry.http.served import running

TIMEOUT_S = 60.0
TOKENS = '[tenants]\nred = "tenants"\n[admins]\nboss = "operators"\n[nodes]\n"*" = "nodes"\n'


def request(remote: str | None = "127.0.0.1", host: str = "127.0.0.1:7442", **headers: str) -> Any:
    return SimpleNamespace(remote=remote, host=host, headers=headers)


@pytest.mark.parametrize("remote", ["127.0.0.1", "127.8.9.1", "::1"])
def test_this_host_may_all(remote: str) -> None:
    assert LocalAccess().allowed(request(remote)) is AccessLevel.ADMIN


@pytest.mark.parametrize("remote", ["10.0.0.1", "fe80::1%eth0", "::2", "", None, "localhost"])
def test_others_may_nothing(remote: str | None) -> None:
    assert LocalAccess().allowed(request(remote)) is AccessLevel.NONE


@pytest.mark.parametrize("host", ["127.0.0.1:7442", "localhost:7442", "localhost", "[::1]:7442"])
def test_own_pages_are_not_foreign(host: str) -> None:
    assert LocalAccess().allowed(request(host=host)) is AccessLevel.ADMIN
    assert not is_foreign(request(host=host))
    assert not is_foreign(request(host=host, Origin=f"http://{host}"))


def test_a_page_of_another_site_is_foreign() -> None:
    assert is_foreign(request(Origin="http://evil.example"))
    assert is_foreign(request(Origin="http://127.0.0.1:9999"))
    assert is_foreign(request(Origin="null"))


@pytest.mark.promise("least-privilege")
def test_a_name_of_elsewhere_that_means_this_host_is_foreign() -> None:
    """A page of evil.example, whose name was changed to 127.0.0.1, is of one origin with it for the browser."""
    assert LocalAccess().allowed(request(host="evil.example:7442")) is AccessLevel.NONE
    own_page = request(host="evil.example:7442", Origin="http://evil.example:7442", Authorization="Bearer any")
    assert LocalAccess().allowed(own_page) is AccessLevel.NONE


def test_what_is_malformed_is_foreign() -> None:
    assert LocalAccess().allowed(request(host="[::1")) is AccessLevel.NONE
    assert is_foreign(request(Origin="http://[x"))


@contextmanager
def serving(access_control: LocalAccess) -> Iterator[str]:
    """An address that answers with what a request may."""
    server = HttpServer("127.0.0.1:0", access_control=access_control)

    async def told(asked: web.Request) -> web.Response:
        return web.Response(text=server.access_control.allowed(asked).name)

    server.add("GET", "/", told, needs=AccessLevel.NONE)
    with running(server):
        yield f"http://{server.address}/"


@pytest.fixture
def address(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    file = tmp_path / "tokens.toml"
    file.write_text(TOKENS)
    with serving(OperatorAccess(Authenticator(str(file) if request.param else ""))) as address:
        yield address


def test_refused_token_is_reported_with_its_address(tmp_path: Path) -> None:
    """A request without any is not: each page of a browser begins with one."""
    file, refused = tmp_path / "tokens.toml", list[tuple[str, str]]()
    file.write_text(TOKENS)
    with serving(OperatorAccess(Authenticator(str(file)), lambda actor, error: refused.append((actor.peer, str(error))))) as address:
        assert access(address) == access(address, "Bearer wrong") == access(address, "Bearer nodes") == "NONE"
        assert access(address, "Bearer operators") == "ADMIN"
    wrong, node = dict.fromkeys(refused)
    assert wrong == ("127.0.0.1", NO_TENANT)
    assert node == ("127.0.0.1", "node is no operator: the console and metrics need a token of [admins]")


def access(address: str, authorization: str = "") -> str:
    request = urllib.request.Request(address, headers={"Authorization": authorization} if authorization else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


@pytest.mark.promise("least-privilege")
@pytest.mark.parametrize("address", [True], indirect=True)
def test_only_operator_tokens_have_access(address: str) -> None:
    assert access(address, "Bearer operators") == access(address, "bearer  operators ") == "ADMIN"
    for other in ("", "Bearer wrong", "Bearer tenants", "Bearer nodes", "Bearer", "Basic operators"):
        assert access(address, other) == "NONE", other


@pytest.mark.parametrize("address", [False], indirect=True)
def test_without_credentials_this_host_may_do_all(address: str) -> None:
    assert access(address) == "ADMIN"


def test_any_token_of_a_file_may_do_all_and_nobody_else_anything(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\n\n  two \n")
    with serving(TokenFileAccess(str(file))) as address:
        assert access(address, "Bearer one") == access(address, "bearer  one ") == access(address, "Bearer two") == "ADMIN"
        for other in ("", "Bearer", "Bearer ", "Bearer wrong", "Bearer later", "Bearer onetwo", "Basic one", "one"):
            assert access(address, other) == "NONE", other


def test_token_file_is_reloaded_unless_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    file.write_text("leaked\n")
    with serving(TokenFileAccess(str(file))) as address:
        assert access(address, "Bearer leaked") == "ADMIN"
        file.write_text("leaked\nits successor\n")
        assert access(address, "Bearer its successor") == access(address, "Bearer leaked") == "ADMIN"
        file.write_text("its successor\n")
        assert (access(address, "Bearer its successor"), access(address, "Bearer leaked")) == ("ADMIN", "NONE")
        file.write_text("")
        assert (access(address, "Bearer its successor"), access(address, "Bearer leaked")) == ("ADMIN", "NONE")
        file.unlink()
        assert access(address, "Bearer its successor") == "ADMIN"
    said = [record.getMessage() for record in caplog.records if "the previous tokens stay valid" in record.getMessage()]
    assert len(said) == 2, "once for each change"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read the tokens of the HTTP port in {path}: .*No such file"),
        (b"\xff\xfe", "cannot read the tokens of the HTTP port in {path}: .*utf-8"),
        (b"", "{path} has no token for the HTTP port"),
        (b" \n\n", "{path} has no token for the HTTP port"),
    ],
)
def test_token_file_without_tokens_is_refused(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=text.format(path=path)):
        TokenFileAccess(str(path))


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("guess", "That token is not known"),
        ("tenants", "That token is a tenant's; the console needs an operator's"),
        ("nodes", "That token is a node's; the console needs an operator's"),
        ("engines", "That token is an engine's; the console needs an operator's"),
        ("former", "That token has expired; ask for a new one"),
        (None, "this request needs a credential with read access"),
    ],
)
def test_a_token_that_is_not_enough_is_refused_with_the_reason(tmp_path: Path, token: str | None, why: str) -> None:
    file = tmp_path / "tokens.toml"
    former = 'former = { token = "former", expires = 2020-01-01 }\n'
    file.write_text(TOKENS.replace("[nodes]", former + "[nodes]") + '[instances]\n"*" = "engines"\n')
    assert refused(OperatorAccess(Authenticator(str(file))), token) == why


def refused(access_control: LocalAccess, token: str | None) -> str:
    """The error of a route that needs READ."""
    server = HttpServer("127.0.0.1:0", access_control=access_control)

    async def fine(_request: web.Request) -> web.Response:
        return web.Response()

    server.add("GET", "/", fine, needs=AccessLevel.READ)
    with running(server):
        asked = urllib.request.Request(f"http://{server.address}/", headers={"Authorization": f"Bearer {token}"} if token else {})
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(asked, timeout=TIMEOUT_S)
        assert refusal.value.code == 401
        return str(json.loads(refusal.value.read())["error"])


def test_an_operator_is_named_by_the_token(tmp_path: Path) -> None:
    """A token revoked in between gives an unauthenticated identity."""
    file = tmp_path / "tokens.toml"
    file.write_text(TOKENS)
    access_control = OperatorAccess(Authenticator(str(file)))

    def named(token: str) -> Identity:
        return access_control.identify(make_mocked_request("GET", "/", headers={"Authorization": f"Bearer {token}"}))

    assert named("operators").name == "boss"
    assert named("wrong") == UNAUTHENTICATED
