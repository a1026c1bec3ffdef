"""Promises of authenticator.py."""

from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError, Unauthorized
from kvstore.security.authenticator import Authenticator
from kvstore.security.identity import PEER_MASTER, Identity, IdentityKind

TEXT = '[tenants]\nred = "secret"\nblue = { token = "short", expires = 2027-01-01 }\n[nodes]\n"*" = "join"\nn1 = "one"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(TEXT)
    return path


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_who_is_identified_holds_until_the_token_ends(file: Path) -> None:
    clock = Clock()
    guard = Authenticator(str(file), wall_s=clock)
    blue = guard.identify("blue", "short")
    assert not guard.allows_anonymous
    assert guard.holds(blue)
    clock.now_s = blue.expires_s
    assert not guard.holds(blue)
    with pytest.raises(Unauthorized):
        guard.identify("blue", "short")


@pytest.mark.parametrize(("name", "token"), [("n1", "one"), ("n1", "join"), ("n2", "join")])
def test_a_node_joins_by_a_token_of_its_name_or_of_any(file: Path, name: str, token: str) -> None:
    assert Authenticator(str(file)).identify_node(name, token).kind is IdentityKind.NODE


@pytest.mark.promise("authentication")
@pytest.mark.parametrize(("name", "token"), [("n2", "one"), ("n1", ""), ("n1", "wrong"), ("red", "secret")])
def test_node_without_its_own_join_token_may_not_join(file: Path, name: str, token: str) -> None:
    guard = Authenticator(str(file))
    with pytest.raises(Unauthorized, match=f"^node '{name}' may not join, its join token is missing or wrong: set join_token "):
        guard.identify_node(name, token)
    assert guard.refused == 1


def test_peer_master_authenticates_only_by_the_master_key(file: Path) -> None:
    guard, other = Authenticator(str(file)), Authenticator(str(file))
    assert guard.identify_master(guard.master_key) is PEER_MASTER
    for wrong in ("", other.master_key, guard.master_key[:-1], "\udcff"):
        with pytest.raises(Unauthorized, match="master key is not this master's"):
            guard.identify_master(wrong)
    assert guard.refused == 4


def test_a_node_joins_by_its_certificate_under_its_own_name_only(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text('[tenants]\nred = "secret"\n')
    guard, certificate = Authenticator(str(file), nodes_have_certificates=True), Identity(IdentityKind.NODE, name="n1")
    assert guard.identify_node("n1", "", certificate) == certificate
    with pytest.raises(Unauthorized):
        guard.identify_node("n2", "", certificate)


def test_a_new_file_takes_the_place_of_the_old_one(file: Path) -> None:
    guard = Authenticator(str(file))
    red = guard.identify("red", "secret")
    assert not guard.has_changed()
    file.write_text(TEXT.replace("secret", "another"))
    assert guard.has_changed()
    assert guard.reread() == [red]
    assert not guard.has_changed()
    assert not guard.holds(red)
    assert guard.identify("red", "another").name == "red"


@pytest.mark.parametrize("bad", ["[tenants\n", None], ids=["malformed", "missing"])
def test_a_bad_file_changes_nothing_and_is_told_once(file: Path, bad: str | None) -> None:
    guard = Authenticator(str(file))
    red, before = guard.identify("red", "secret"), guard.identities()
    file.unlink() if bad is None else file.write_text(bad)
    assert guard.has_changed()
    with pytest.raises(ConfigError):
        guard.reread()
    assert not guard.has_changed()
    assert guard.holds(red)
    assert guard.identities() == before
    file.write_text(TEXT.replace("secret", "another"))
    assert guard.reread() == [red]
    assert {one.name for one in guard.identities() - before} == {one.name for one in before - guard.identities()} == {"red"}


@pytest.mark.promise("authentication")
def test_who_guesses_is_counted_and_keeps_nobody_out(file: Path) -> None:
    guard = Authenticator(str(file))
    for number in range(1000):
        with pytest.raises(Unauthorized):
            guard.identify("red", str(number))
    assert guard.refused == 1000
    assert guard.identify("red", "secret").name == "red"
