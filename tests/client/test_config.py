"""The settings of a client, and from which source each comes."""

from pathlib import Path
from typing import Any

import pytest

from kvstore.client.config import SECTION, ClientSettings, resolve_settings
from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.protocol.settings import load_settings


def resolved(settings: ClientSettings | None = None, **arguments: Any) -> ClientSettings:
    return resolve_settings(settings, **{**dict.fromkeys(("master", "tenant", "token", "deadline_s")), **arguments})


def test_defaults_and_environment() -> None:
    settings = load_settings(ClientSettings, SECTION, flags={}, environ={"KVSTORE_CLIENT_COPY_THREADS": "2"})
    assert (settings.copy_threads, settings.master) == (2, "127.0.0.1:7440")


def test_each_value_comes_from_its_strongest_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Argument, settings, environment, file, default: one value of each."""
    file = tmp_path / "kvstore.toml"
    file.write_text('[client]\nmaster = "file:1"\ntenant = "file"\ntoken = "file"\ndeadline_s = 9\ntls_ca = "file.pem"\n')
    monkeypatch.setenv("KVSTORE_CONFIG", str(file))
    for name in ("TENANT", "TOKEN", "DEADLINE_S"):
        monkeypatch.setenv(f"KVSTORE_CLIENT_{name}", "8" if name == "DEADLINE_S" else "environment")
    found = resolved(ClientSettings(token="settings", deadline_s=7.0), deadline_s=7.0, master=["a:1", "b:2"])
    assert (found.master, found.deadline_s, found.token) == ("a:1,b:2", 7.0, "settings")
    assert (found.tenant, found.tls_ca, found.ack) == ("environment", "file.pem", "node")
    alone = resolved()
    assert (alone.master, alone.tenant, alone.token, alone.deadline_s) == ("file:1", "environment", "environment", 8.0)
    assert alone.is_loaded


def test_complete_settings_use_no_other_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CLIENT_TENANT", "environment")
    assert resolved(ClientSettings(is_loaded=True)).tenant == ""
    assert resolved(ClientSettings(is_loaded=True), tenant="argument").tenant == "argument"
    by_flag = load_settings(ClientSettings, SECTION, flags={"tenant": ""})
    assert resolved(by_flag).tenant == "", "a flag is stronger than the environment, also with the default's value"


def test_tokens_that_differ_are_refused_and_not_shown() -> None:
    with pytest.raises(InvalidArgument, match=r"^token is given twice") as caught:
        resolved(ClientSettings(token="first secret"), token="other secret")
    assert "secret" not in str(caught.value)


def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CLIENT_DEADLINE_S", "soon")
    with pytest.raises(ConfigError, match="KVSTORE_CLIENT_DEADLINE_S: 'soon' is not a number"):
        resolved()
