"""A client that has nothing but a certificate, on the host of its master and node: it works, and ends, there as over TCP."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.client.aio import AsyncClient
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.sync import Client
from kvstore.protocol.errors import InvalidTicket, KVStoreError, Unauthorized, Untrusted
from kvstore.protocol.master_messages import Nodes, NodeTable
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls import subjects
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.config import TlsSettings
from kvstore.security.tls.subjects import CertificateSubject
from kvstore.testing.transfer.awaited import eventually
from tests.credentials import OPERATOR, tokens_file
from tests.security.tls.certified import Cluster, flags, given_to, revoke, swap
from tests.system.encrypted import Encrypted, environment
from tests.system.running import PATIENT_S, System, refusal

KEY, VALUE = b"key", b"value" * 1000
ABSENT = b"absent"
REVOKED = r"^the certificate of this side has been revoked \(tls_revoked\): use another one$"


@pytest.fixture
def revoked(tmp_path: Path) -> Path:
    """The file `tls_revoked` of the cluster; it names nothing yet."""
    path = tmp_path / "revoked"
    revoke(path)
    return path


@pytest.fixture
def encrypted(tmp_path: Path, revoked: Path) -> Iterator[Encrypted]:
    """A master with tokens and a node, both with certificates."""
    with System(tmp_path) as system:
        tokens = tokens_file(tmp_path, {"red": "secret"})
        found = Encrypted(tmp_path, system, "--tokens", tokens, "--tls-revoked", str(revoked))
        found.node("n0", "--join-token", "", "--tls-revoked", str(revoked))
        yield found


def by_certificate(encrypted: Encrypted, token: str = "") -> ClientSettings:
    """Of tenant red, with a certificate of its own."""
    return replace(encrypted.client("red"), tenant="red", token=token, deadline_s=PATIENT_S)


@pytest.mark.promise("tls-everywhere")
def test_a_client_by_certificate_alone_works_on_its_masters_host(encrypted: Encrypted) -> None:
    """Calls that the node cannot answer go to the master over TCP, where the certificate is shown; values stay in shared memory."""
    settings = by_certificate(encrypted)
    with encrypted.system.client(settings=settings) as client:
        assert client.get(ABSENT) is None
        assert client.put(KEY, VALUE)
        assert client.get(KEY) == VALUE
        assert client.match_prefix([KEY, ABSENT]) == 1
        assert client.exists_batch([KEY, ABSENT]) == [True, False]
        assert client.keys() == [KEY]
        assert client.ping() > 0
        assert client.shared_memory() == {"n0": ""}
        assert client.remove([KEY]) == 1
        assert not client._operations.resources.daemons.masters.to_owner().is_local


def test_a_client_that_names_the_unix_socket_is_told_what_to_do(encrypted: Encrypted, tmp_path: Path) -> None:
    [unix] = (tmp_path / "m0").glob("*.sock")
    settings = replace(by_certificate(encrypted), master=f"unix:{unix}", is_loaded=True)
    with Client(settings=settings) as client, pytest.raises(Unauthorized, match="use the master's HOST:PORT with a certificate"):
        client.exists(ABSENT, deadline_s=PATIENT_S)
    with Client(settings=replace(settings, token="secret")) as client:
        assert not client.exists(ABSENT, deadline_s=PATIENT_S)


def test_an_operator_with_certificate_and_token_names_a_tenant(encrypted: Encrypted) -> None:
    """As deploy/systemd/kvstore-tls.toml has it. By the certificate alone an operator may have named none by mistake."""
    with encrypted.system.client(settings=by_certificate(encrypted)) as client:
        client.put(KEY, VALUE, ack="cluster")

    def run(*arguments: str, **more: str) -> tuple[int, str, str]:
        environ = {**environment(encrypted.system.settings), "KVSTORE_MASTER": encrypted.system.address, **more}
        done = CliRunner().invoke(kvstore, [*arguments, "--deadline-s", str(PATIENT_S)], env=environ)
        return done.exit_code, done.stdout, done.stderr

    tenant = ("--tenant", "red")
    assert run("keys", *tenant, KVSTORE_CLIENT_TOKEN=OPERATOR) == run("keys", *tenant) == (0, "key\n", "")
    assert run("exists", "key", *tenant, KVSTORE_CLIENT_TOKEN=OPERATOR) == (0, "key: there\n", "")
    assert run("keys") == (0, "", "no key is stored without a tenant: name the tenant whose keys to list (--tenant NAME)\n")
    assert run("rm", "key", *tenant, KVSTORE_CLIENT_TOKEN=OPERATOR) == (0, "removed 1 of 1\n", "")


def refuses(call: Callable[[], object]) -> Callable[[], bool]:
    """Return whether the call fails by now."""

    def is_so() -> bool:
        try:
            call()
        except KVStoreError:
            return True
        return False

    return is_so


def unix_session(encrypted: Encrypted, settings: ClientSettings) -> tuple[Address, Hello]:
    """The node's Unix socket, and what opens it: a ticket upon the certificate of these settings."""
    master, tls = parse_address(encrypted.system.address), Certificates.of(settings)
    hello, deadline = Hello(ROLE_CLIENT, "red", settings.token), Deadline(PATIENT_S)
    with closing(Channel.open(master, hello, deadline, tls=tls)) as channel:
        table = channel.call(Nodes(), NodeTable, deadline)
    return Address(unix=table.unix[0]), Hello(ROLE_CLIENT, "red", ticket=table.tickets[0])


@pytest.mark.promise("tls-everywhere")
@pytest.mark.parametrize("token", ["", "secret"])
def test_a_revoked_certificate_ends_unix_sessions_and_tickets(encrypted: Encrypted, revoked: Path, token: str) -> None:
    """Also beside a token that is good. Others of the tenant go on."""
    system, leaked = encrypted.system, by_certificate(encrypted, token)
    unix, hello = unix_session(encrypted, leaked)
    session, kept = Channel.open(unix, hello, Deadline(PATIENT_S)), by_certificate(encrypted, token)
    with closing(session), system.client(settings=leaked) as ended, system.client(settings=kept) as going_on:
        for client in (ended, going_on):
            client.put(KEY, VALUE)
            assert client.get(KEY) == VALUE
            assert client.shared_memory() == {"n0": ""}
        revoke(revoked, leaked)
        eventually(session.is_closed_by_peer, "the node ends the session of its Unix socket")
        with pytest.raises(InvalidTicket, match="the certificate of this ticket is revoked"):
            Channel.open(unix, hello, Deadline(PATIENT_S))
        eventually(refuses(lambda: ended.get(KEY)), "its own keys are not read any more")
        for call in (lambda: ended.get(KEY), lambda: ended.put(b"another", VALUE), lambda: ended.exists(ABSENT)):
            eventually(refuses(call), "nor is any put, nor the master asked")
            with pytest.raises(Untrusted, match=REVOKED):
                call()
        assert going_on.get(KEY) == VALUE
        assert going_on.put(b"another", VALUE)


@pytest.mark.promise("tls-everywhere")
def test_a_revoked_certificate_ends_at_nodes_without_a_master(encrypted: Encrypted, revoked: Path) -> None:
    """A node looks at its own file: it waits for no master to say so."""
    leaked = by_certificate(encrypted)
    unix, hello = unix_session(encrypted, leaked)
    with closing(Channel.open(unix, hello, Deadline(PATIENT_S))) as session:
        encrypted.system.masters[0].kill()
        revoke(revoked, leaked)
        eventually(session.is_closed_by_peer, "the node ends the session")
        with pytest.raises(InvalidTicket, match="revoked"):
            Channel.open(unix, hello, Deadline(PATIENT_S))


@pytest.fixture
def exported(encrypted: Encrypted, monkeypatch: pytest.MonkeyPatch) -> ClientSettings:
    """Master, tenant and certificate of a client, as its environment has them."""
    settings = by_certificate(encrypted)
    for name in ("master", "tenant", "tls_ca", "tls_cert", "tls_key"):
        monkeypatch.setenv(f"KVSTORE_CLIENT_{name.upper()}", getattr(settings, name))
    return settings


@pytest.mark.promise("settings-checked")
def test_client_takes_certificate_and_tenant_from_variables(exported: ClientSettings) -> None:
    with Client(deadline_s=PATIENT_S) as client:
        assert client.put(KEY, VALUE, ack="cluster")
    with Client(settings=ClientSettings(deadline_s=PATIENT_S)) as client:
        assert client.get(KEY) == VALUE
        assert client.settings.tls_cert == exported.tls_cert
    with Client(settings=replace(exported, is_loaded=True)) as client:
        assert client.get(KEY) == VALUE


MASTER, NODE = "kvstore.master.daemon", "kvstore.store.daemon"
ANYWHERE = ("--listen", "127.0.0.1:0")


@pytest.mark.promise("tls-everywhere")
def test_master_with_foreign_certificate_does_not_start(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "certs")
    line = refusal(MASTER, *ANYWHERE, "--run-dir", str(tmp_path), *flags(cluster.node("n1")))
    assert "tls_cert is for kvstore://node/n1, and kvstore://master is required" in line


@pytest.mark.promise("tls-everywhere")
@pytest.mark.parametrize(
    ("more", "host"), [((), "127.0.0.1"), (("--advertise", "master-1"), "master-1"), (("--control", "localhost:0"), "localhost")]
)
def test_a_master_with_another_hosts_certificate_does_not_start(tmp_path: Path, more: tuple[str, ...], host: str) -> None:
    hosts = tuple(name for name in ("127.0.0.1", "master-2") if name != host)
    of_another = Cluster(tmp_path / "certs").server(CertificateSubject(subjects.MASTER), hosts=hosts)
    line = refusal(MASTER, *ANYWHERE, *more, "--run-dir", str(tmp_path), *flags(of_another))
    assert f"tls_cert does not have {host}, by which peers reach this master" in line


@pytest.mark.promise("tls-everywhere")
def test_a_node_with_another_ones_certificate_does_not_start(tmp_path: Path) -> None:
    own = Cluster(tmp_path / "certs").node("n1")
    common = (*ANYWHERE, "--dram", "16MiB", "--run-dir", str(tmp_path), *flags(own))
    assert "kvstore://node/n2 is required: set the certificate of this node" in refusal(NODE, "--name", "n2", *common)
    line = refusal(NODE, "--name", "n1", *common, "--advertise", "node-1:7450")
    assert "tls_cert does not have node-1, by which peers reach this node" in line


@pytest.mark.promise("tls-everywhere")
def test_a_client_with_a_revoked_certificate_is_told_so(encrypted: Encrypted, revoked: Path) -> None:
    leaked = by_certificate(encrypted)
    revoke(revoked, leaked)

    async def use() -> None:
        async with AsyncClient(settings=leaked) as client:
            with pytest.raises(Untrusted, match=REVOKED):
                await client.get(KEY)

    asyncio.run(use())
    with Client(settings=leaked) as client, pytest.raises(Untrusted, match=REVOKED):
        client.get(KEY)
    with pytest.raises(Untrusted, match=REVOKED):
        Control.find(leaked)


@pytest.mark.promise("tls-everywhere")
def test_an_authority_is_exchanged_while_clients_work(encrypted: Encrypted, tmp_path: Path) -> None:
    """As docs/security.md says: trust both, exchange every certificate, trust the new one only. One client goes on over all of it."""
    settings, ca = by_certificate(encrypted), Path(encrypted.of_master.tls_ca)
    new = Cluster(tmp_path / "new")

    def trust(*authorities: Path) -> None:
        fresh = ca.with_suffix(".fresh")
        fresh.write_text("".join(map(Path.read_text, authorities)))
        fresh.replace(ca)

    def exchange(own: TlsSettings, made: TlsSettings) -> None:
        swap(own, replace(made, tls_ca=str(ca)))

    old = Path(shutil.copy(ca, tmp_path / "old.pem"))
    with encrypted.system.client(settings=settings) as going_on:
        for step in ("before", "both are trusted", "all are exchanged", "the new one is trusted"):
            if step == "both are trusted":
                trust(old, new.folder / "ca.pem")
            elif step == "all are exchanged":
                exchange(encrypted.of_master, new.master())
                exchange(encrypted.of_nodes["n0"], new.node("n0"))
                exchange(settings, new.client("red"))
            elif step == "the new one is trusted":
                trust(new.folder / "ca.pem")
            for client in (going_on, encrypted.system.client(settings=settings), encrypted.system.remote_client(settings=settings)):
                with client if client is not going_on else nullcontext(client):
                    key = f"{step} {id(client)}".encode()
                    assert client.put(key, VALUE)
                    assert client.get(key) == VALUE
            with Control.find(settings) as control:
                assert control.status().role == "owner"
    of_old = given_to(settings, encrypted.authority.client("red"))
    trust_new = replace(of_old, tls_ca=str(new.folder / "ca.pem"))
    with encrypted.system.client(settings=trust_new) as client, pytest.raises(Untrusted, match="does not know the authority"):
        client.get(KEY)
