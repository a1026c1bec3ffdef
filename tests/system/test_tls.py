"""A cluster in which every connection is mutual TLS: it works as without TLS, and rejects peers without a certificate of the cluster."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.protocol.errors import KVStoreError, Unauthorized, Untrusted
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.grpc_credentials import open_channel
from kvstore.security.tls.subjects import MASTER, CertificateSubject
from kvstore.transfer.config import TransferSettings
from tests.credentials import tokens_file
from tests.security.tls.certified import HOSTS, Cluster, given_to, past, revoke, swap
from tests.system.encrypted import Encrypted, environment
from tests.system.history import value_of
from tests.system.running import MIB, PATIENT_S, System, until

SIZES = (700, 70_000, MIB)
KEYS = [b"block-%d" % number for number in range(30)]
VALUES = [value_of(key, 0, SIZES[number % 3]) for number, key in enumerate(KEYS)]
BY_TCP = TransferSettings(transports="tcp")


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[Encrypted]:
    with System(tmp_path) as system:
        yield Encrypted(tmp_path, system)


@pytest.mark.promise("tls-everywhere")
def test_values_are_put_got_copied_and_moved_over_tls(encrypted: Encrypted) -> None:
    system, settings = encrypted.system, encrypted.client()
    for name in ("n0", "n1"):
        encrypted.node(name)
    with system.remote_client(settings=settings, transfer=BY_TCP) as far, system.client(settings=settings) as near:
        assert far.put_batch(KEYS, VALUES, replicas=2, ack="replicas") == [True] * len(KEYS)
        assert far.get_batch(KEYS) == near.get_batch(KEYS) == VALUES
        assert all(far.get(key) == value for key, value in zip(KEYS, VALUES, strict=True))
        assert {place.node for places in near.locate(KEYS) for place in places} == {"n0", "n1"}
        drained = CliRunner().invoke(kvstore, ["drain", "n0", "--master", system.address], env=environment(system.settings))
        assert "n0 is drained: no block is in its memory only" in drained.output
        system.kill_node("n0")
        assert far.get_batch(KEYS) == VALUES


@pytest.mark.promise("tls-everywhere")
def test_an_asynchronous_client_over_tls(encrypted: Encrypted) -> None:
    import asyncio

    from kvstore.client.aio import AsyncClient

    encrypted.node("n0")
    settings = replace(encrypted.client(), ack="cluster", deadline_s=PATIENT_S)

    async def use() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvstore.client.operations.is_local_socket", lambda unix, host_id: False)
            client = AsyncClient(encrypted.system.address, settings=settings, transfer=BY_TCP)
        async with client:
            assert await client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
            assert await client.get_batch(KEYS) == VALUES

    asyncio.run(use())


def refused(system: System, settings: ClientSettings, kind: type[KVStoreError] = Untrusted) -> str:
    """Return the error message of a lookup by a client with these settings."""
    with system.client(settings=settings) as client, pytest.raises(kind) as caught:
        client.exists(b"key", deadline_s=PATIENT_S)
    return str(caught.value)


@pytest.mark.promise("tls-everywhere")
def test_tls_refuses_clients_without_a_certificate(encrypted: Encrypted, tmp_path: Path) -> None:
    system, good = encrypted.system, encrypted.client()
    encrypted.node("n0")
    other = Cluster(tmp_path / "other")
    assert "this port requires TLS, and this side does not use it: set its tls_ca" in refused(system, ClientSettings())
    assert "requires a certificate" in refused(system, replace(good, tls_cert="", tls_key=""))
    assert "signed by an authority that is not in tls_ca" in refused(system, given_to(good, other.client()))
    stranger = replace(other.client(), tls_ca=good.tls_ca)
    assert "does not know the authority of this side's certificate" in refused(system, given_to(good, stranger))
    assert "this side's certificate has expired" in refused(system, given_to(good, encrypted.authority.client("", valid=past())))
    of_node = given_to(good, encrypted.authority.node("n0"))
    assert "is for kvstore://node/n0, and a client of tenant '' introduces itself" in refused(system, of_node, Unauthorized)
    of_other = given_to(good, encrypted.authority.client("blue"))
    assert "is for kvstore://client/blue, and a client of tenant ''" in refused(system, of_other, Unauthorized)


def test_a_certificate_does_in_place_of_a_token(tmp_path: Path) -> None:
    """With a tokens file, of master and nodes alike; beside a token both count."""
    with System(tmp_path) as system:
        tokens = tokens_file(tmp_path, {"red": "secret", "blue": "other"})
        encrypted = Encrypted(tmp_path, system, "--tokens", tokens)
        encrypted.node("n0", "--join-token", "")
        red, blue = encrypted.client("red"), encrypted.client("blue")
        with system.remote_client(settings=red, tenant="red", transfer=BY_TCP) as client:
            assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
            assert client.get_batch(KEYS) == VALUES
        with system.remote_client(settings=red, tenant="red", token="secret", transfer=BY_TCP) as client:
            assert client.get(KEYS[0]) == VALUES[0]
        with system.remote_client(settings=blue, tenant="blue", transfer=BY_TCP) as client:
            assert client.get(KEYS[0]) is None
        with system.remote_client(settings=blue, tenant="red", token="secret", transfer=BY_TCP) as client, pytest.raises(Unauthorized):
            client.get(KEYS[0])
        with system.remote_client(settings=red, tenant="red", token="wrong", transfer=BY_TCP) as client, pytest.raises(Unauthorized):
            client.get(KEYS[0])


@pytest.mark.promise("tls-everywhere")
def test_a_client_is_no_node_on_the_control_plane_either(encrypted: Encrypted) -> None:
    with Control.find(encrypted.system.settings) as control:
        assert control.status().role == "owner"
    place = f"127.0.0.1:{encrypted.system._master_ports[0][1]}"

    def registers(settings: ClientSettings, name: str) -> grpc.StatusCode:
        with open_channel(place, Certificates.of(settings), []) as channel:
            call: Any = ControlStub(channel).Register.future(pb.RegisterRequest(name=name, version="0"), timeout=PATIENT_S)  # type: ignore[no-untyped-call]
            call.exception()
            return call.code()  # type: ignore[no-any-return]

    good = encrypted.client()
    assert registers(encrypted.client("red"), "n9") is grpc.StatusCode.PERMISSION_DENIED
    assert registers(given_to(good, encrypted.authority.node("n1")), "n9") is grpc.StatusCode.PERMISSION_DENIED
    assert registers(ClientSettings(), "n9") is grpc.StatusCode.UNAVAILABLE
    assert registers(replace(good, tls_cert="", tls_key=""), "n9") is grpc.StatusCode.UNAVAILABLE


@pytest.mark.promise("tls-everywhere")
def test_tls_revoked_certificate_ends_its_sessions(tmp_path: Path) -> None:
    """At master and node, over frames and gRPC; all others go on."""
    revoked = tmp_path / "revoked"
    revoke(revoked)
    with System(tmp_path) as system, ExitStack() as opened:
        encrypted = Encrypted(tmp_path, system, "--tls-revoked", str(revoked))
        encrypted.node("n0", "--tls-revoked", str(revoked))
        leaked, kept = encrypted.client("red"), encrypted.client("red")
        daemons = [f"127.0.0.1:{port}" for port in (system._master_ports[0][0], system._node_ports["n0"])]
        place = f"127.0.0.1:{system._master_ports[0][1]}"

        def channels(settings: ClientSettings) -> list[Channel]:
            tls, hello = Certificates.of(settings), Hello(ROLE_CLIENT, "red")
            found = [Channel.open(parse_address(address), hello, Deadline(PATIENT_S), tls=tls) for address in daemons]
            for channel in found:
                opened.callback(channel.close)
            return found

        def calls(settings: ClientSettings) -> Callable[[], grpc.StatusCode]:
            control = opened.enter_context(open_channel(place, Certificates.of(settings), []))

            def code() -> grpc.StatusCode:
                call: Any = ControlStub(control).Status.future(pb.StatusRequest(), timeout=PATIENT_S)  # type: ignore[no-untyped-call]
                call.exception()
                return call.code()  # type: ignore[no-any-return]

            return code

        ended, going_on = channels(leaked), channels(kept)
        asks, asks_on = calls(leaked), calls(kept)
        assert asks() is asks_on() is grpc.StatusCode.OK
        revoke(revoked, leaked)
        for channel in ended:
            until(channel.is_closed_by_peer, "the session of a certificate that is revoked ends")
        assert asks() is calls(leaked)() is grpc.StatusCode.UNAUTHENTICATED
        for address in daemons:
            with pytest.raises(KVStoreError):
                Channel.open(parse_address(address), Hello(ROLE_CLIENT, "red"), Deadline(PATIENT_S), tls=Certificates.of(leaked))
        assert not any(channel.is_closed_by_peer() for channel in going_on)
        assert asks_on() is grpc.StatusCode.OK
        with system.remote_client(settings=kept, tenant="red", transfer=BY_TCP) as client:
            assert client.put(KEYS[0], VALUES[0])
            assert client.get(KEYS[0]) == VALUES[0]


def in_one_file(settings: ClientSettings) -> ClientSettings:
    """Its certificate and key, which are then exchanged at once."""
    both = Path(settings.tls_cert).with_suffix(".both")
    both.write_bytes(Path(settings.tls_cert).read_bytes() + Path(settings.tls_key).read_bytes())
    return replace(settings, tls_cert=str(both), tls_key=str(both))


@pytest.mark.promise("tls-everywhere")
def test_tls_certificate_rotation_loses_no_operation(encrypted: Encrypted) -> None:
    """Every file of every process changes, again and again, while new connections are made all the time."""
    system = encrypted.system
    encrypted.node("n0")
    settings = in_one_file(encrypted.client())  # clients are made all the time, also between the exchange of one file and the next
    over, failures, rounds = threading.Event(), list[BaseException](), [0]

    def work(number: int) -> None:
        try:
            while not over.is_set():
                with system.remote_client(settings=settings, transfer=BY_TCP) as client:
                    key = b"%d-%d" % (number, rounds[0])
                    value = value_of(key, 0, SIZES[rounds[0] % 3])
                    client.put(key, value)
                    assert client.get(key) == value
                    rounds[0] += 1
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(3):
            swap(encrypted.of_master, encrypted.authority.server(CertificateSubject(MASTER), hosts=HOSTS))
            swap(encrypted.of_nodes["n0"], encrypted.authority.node("n0"))
            swap(settings, in_one_file(encrypted.client()))
            done = rounds[0]
            until(lambda done=done: rounds[0] >= done + 4 or bool(failures), "work goes on")  # type: ignore[misc]
    finally:
        over.set()
        for worker in workers:
            worker.join()
    assert not failures, failures


@pytest.mark.promise("tls-everywhere")
def test_the_command_line_takes_the_same_settings(encrypted: Encrypted) -> None:
    encrypted.node("n0")
    own = environment(encrypted.client("*"))
    found = CliRunner().invoke(kvstore, ["status", "--master", encrypted.system.address], env=own)
    assert found.exit_code == 0, found.output
    assert "1 of 1 alive" in found.output
    found = CliRunner().invoke(kvstore, ["status", "--master", encrypted.system.address])
    assert found.exit_code == 2
    assert "this port requires TLS" in found.output
