"""Tests of `PermissionFiles` in sessions.py: a master rereads its files without a restart, and ends the sessions of removed tokens."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError, Unauthorized, Unavailable, Untrusted
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.session_messages import ROLE_CLIENT, Flags, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.grpc_metadata import as_metadata
from kvstore.security.tls.config import TlsSettings
from kvstore.testing.transfer.awaited import eventually
from tests.credentials import JOIN, OPERATOR, tokens_file, tokens_text
from tests.master.running import TIMEOUT_S, MasterProcess, NodeSide, Places, ask, master_in_thread
from tests.security.tls.certified import Cluster, certificates, swap

OFTEN_S = 0.05


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path / "run", tokens=tokens_file(tmp_path), tokens_check_interval_s=OFTEN_S, node_ttl_s=60.0) as found:
        yield found


def opens(places: Places, token: str, tenant: str = "red") -> bool:
    try:
        places.client(tenant, token).close()
    except Unauthorized:
        return False
    return True


def is_open(client: Channel) -> bool:
    try:
        return ask(client, Exists([b"k"]), Flags).flags == b"\0"
    except KVStoreError:
        return False


@pytest.mark.promise("authentication")
def test_removed_token_ends_its_sessions_only(tmp_path: Path, places: Places) -> None:
    tokens_file(tmp_path, {"red": "secret", "blue": "other"})
    eventually(lambda: opens(places, "other", "blue"), "the new tenant is let in")
    red, blue = places.client("red", "secret"), places.client("blue", "other")
    tokens_file(tmp_path, {"red": "changed", "blue": "other"})
    eventually(lambda: not is_open(red), "the session with the former token has ended")
    assert is_open(blue)
    assert not opens(places, "secret")
    assert opens(places, "changed")
    red.close()
    blue.close()


@pytest.mark.promise("authentication")
def test_a_token_ends_its_sessions_at_its_time(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, more='[[tenants.late]]\ntoken = "short"\nexpires = 2100-01-01\n')
    now_s = [0.0]
    with master_in_thread(tmp_path / "run", tokens=tokens, tokens_check_interval_s=OFTEN_S, wall_s=lambda: now_s[0]) as places:
        late, red = places.client("late", "short"), places.client("red", "secret")
        assert is_open(late)
        now_s[0] = datetime(2100, 1, 1, tzinfo=UTC).timestamp()
        eventually(lambda: not is_open(late), "its time is over")
        assert is_open(red)
        assert not opens(places, "short", "late")
        late.close()
        red.close()


@pytest.mark.promise("authentication")
def test_node_with_removed_join_token_is_disconnected(tmp_path: Path, places: Places) -> None:
    node = NodeSide(places, token=JOIN)
    Path(tokens_file(tmp_path)).write_text((tmp_path / "tokens.toml").read_text().replace(JOIN, "another"))
    node.sock.settimeout(TIMEOUT_S)
    assert node.sock.recv(1) == b"", "the master hangs up"
    with pytest.raises(grpc.RpcError) as refused:
        NodeSide(places, token=JOIN)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    node.close()
    NodeSide(places, token="another").close()


@pytest.mark.promise("authentication")
def test_a_bad_file_changes_nothing(tmp_path: Path, places: Places, caplog: pytest.LogCaptureFixture) -> None:
    red = places.client("red", "secret")
    (tmp_path / "tokens.toml").write_text("[tenants")
    eventually(lambda: "tokens reload tokens file, failed: " in caplog.text, "the log says so")
    assert is_open(red)
    assert opens(places, "secret")
    red.close()


@pytest.mark.promise("authentication")
@pytest.mark.promise("tenant-quotas")
def test_sighup_has_the_file_read_at_once_and_kills_nobody(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path)
    master = MasterProcess(tmp_path / "run", ("--tokens", tokens, "--tokens-check-interval-s", "3600"))
    places = master.start()
    try:
        red = places.client("red", "secret")
        tokens_file(tmp_path, {"red": "changed"})
        os.kill(places.pid, signal.SIGHUP)
        eventually(lambda: not is_open(red), "the session has ended")
        assert opens(places, "changed")
        red.close()
    finally:
        assert master.stop() == 0


@pytest.mark.promise("authentication")
def test_a_thousand_wrong_tokens_keep_nobody_out(places: Places) -> None:
    with places.stub() as stub:
        for number in range(1000):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S, metadata=as_metadata("red", str(number)))
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S, metadata=as_metadata("red", "secret")).role == "owner"
        whole = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S, metadata=as_metadata("", OPERATOR))
        assert whole.counters["credentials_refused"] == 1000
    assert not opens(places, "0")
    assert opens(places, "secret")


def exchange(file: Path, text: str) -> None:
    """In one step: a master that looks in between would find half a file."""
    aside = file.with_suffix(".new")
    aside.write_text(text)
    aside.replace(file)


def audited(places: Places, action: str) -> list[tuple[str, str, str, str]]:
    """Old and new value, result and detail of this action's entries."""
    master = places.master
    assert master is not None
    entries = master.reactor.call(lambda: master.partitions[0].role_manager.audit().after(0), deadline_s=TIMEOUT_S)
    return [(one.old, one.new, one.result, one.detail) for one in entries if (one.via, one.action) == ("file", action)]


def test_changes_of_the_tokens_file_are_audited(tmp_path: Path, places: Places) -> None:
    exchange(tmp_path / "tokens.toml", tokens_text({"red": "secret", **{f"t{number:02}": f"token {number}" for number in range(12)}}))
    eventually(lambda: len(audited(places, "tokens_reload")) == 1, "the file is read")
    exchange(tmp_path / "tokens.toml", "[tenants")
    eventually(lambda: len(audited(places, "tokens_reload")) == 2, "it is looked at")
    (old, new, result, detail), failed = audited(places, "tokens_reload")
    assert (old, new, result) == ("4 tokens", "16 tokens", "done")
    named = ", ".join(f"tenant 't{number:02}' with role write" for number in range(10))
    assert detail == f"added: {named} and 2 more; removed: none"
    assert failed[2] == "failed"
    assert "tokens.toml" in failed[3]


def test_changes_of_the_quotas_file_are_audited(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[default]\npins = 1\n[tenants.red]\npins = 2\n")
    with master_in_thread(tmp_path / "run", quotas=str(quotas), tokens_check_interval_s=OFTEN_S) as places:
        exchange(quotas, "[default]\npins = 3\n[tenants.red]\npins = 22\n")
        eventually(lambda: len(audited(places, "quotas_reload")) == 1, "the file is read")
        exchange(quotas, "[default]\npin = 3\n")
        eventually(lambda: len(audited(places, "quotas_reload")) == 2, "it is looked at")
        done, failed = audited(places, "quotas_reload")
    assert done == ("", "", "done", "changed: default, red")
    assert failed[2] == "failed"


def test_changed_certificates_and_refused_ones_are_audited(tmp_path: Path) -> None:
    """A peer whose certificate is not accepted has no name: its address is what is known of it."""
    cluster, strange = Cluster(tmp_path / "ours"), Cluster(tmp_path / "theirs")
    settings = cluster.master()
    tls = {name: getattr(settings, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    with master_in_thread(tmp_path / "run", **tls) as places:

        def opens(client: TlsSettings) -> bool:
            hello, found = Hello(ROLE_CLIENT, "red"), certificates(client)
            try:
                Channel.open(parse_address(places.listen), hello, Deadline(TIMEOUT_S), tls=found).close()
            except (Untrusted, Unavailable):
                return False
            return True

        assert opens(cluster.client("red"))
        swap(settings, cluster.master())
        assert opens(cluster.client("red"))
        eventually(lambda: [one[2] for one in audited(places, "certificates_reload")] == ["done"], "the new ones are in use")
        Path(settings.tls_key).write_bytes(b"nonsense")
        assert opens(cluster.client("red"))
        eventually(lambda: [one[2] for one in audited(places, "certificates_reload")][1:] == ["failed"], "the former go on")
        theirs = replace(strange.client("red"), tls_ca=settings.tls_ca)
        assert not opens(theirs)
        master = places.master
        assert master is not None

        def refused() -> list[tuple[str, str, str]]:
            entries = master.reactor.call(lambda: master.partitions[0].role_manager.audit().after(0), deadline_s=TIMEOUT_S)
            return [(one.kind, one.peer, one.action) for one in entries if one.result == "refused"]

        eventually(lambda: ("unauthenticated", "127.0.0.1", "login") in refused(), "the refused certificate")
