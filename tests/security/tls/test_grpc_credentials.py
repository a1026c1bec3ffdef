"""Promises of grpc_credentials.py, with real servers and channels of gRPC; what a master makes of callers:
tests/master, tests/system.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.config import TlsSettings
from kvstore.security.tls.grpc_credentials import add_port, caller, open_channel
from kvstore.security.tls.subjects import CLIENT, MASTER, CertificateSubject
from kvstore.testing.transfer.awaited import PATIENCE_S
from tests.security.tls.certified import HOSTS, Cluster, certificates, past, shared, swap

METHOD = "/tests.Who/Is"


class Who(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers every call with what the caller's certificate says."""

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        return grpc.unary_unary_rpc_method_handler(lambda _request, context: str(caller(context)).encode())


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(opened: ExitStack, tls: Certificates | None) -> str:
    """Start a server and return its address."""
    threads = opened.enter_context(ThreadPoolExecutor(2))
    server = grpc.server(threads, handlers=[Who()])
    port = add_port(server, "127.0.0.1:0", tls)
    server.start()
    opened.callback(lambda: server.stop(0).wait(PATIENCE_S))
    return f"127.0.0.1:{port}"


def ask(place: str, settings: TlsSettings | None) -> str:
    """Return the server's identity of the caller, or the status of a failed call."""
    with open_channel(place, Certificates.of(settings) if settings is not None else None, []) as channel:
        call = channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None).future(b"?", timeout=PATIENCE_S)
        if call.exception() is None:
            return str(call.result().decode())
        return call.code().name


def test_a_caller_is_known_by_its_certificate(opened: ExitStack) -> None:
    place = serve(opened, certificates(shared().master()))
    assert ask(place, shared().client("red team")) == "kvstore://client/red%20team"
    assert ask(place, shared().node("one")) == "kvstore://node/one"


def test_whom_certificates_keep_out(opened: ExitStack, tmp_path: Path) -> None:
    place = serve(opened, certificates(shared().master()))
    bare = replace(shared().client(), tls_cert="", tls_key="")
    assert ask(place, None) == ask(place, bare) == ask(place, Cluster(tmp_path).client()) == "UNAVAILABLE"
    assert ask(place, shared().client("", valid=past())) == "UNAVAILABLE"
    elsewhere = serve(opened, certificates(shared().server(CertificateSubject(MASTER), hosts=("elsewhere",))))
    assert ask(elsewhere, shared().client()) == "UNAVAILABLE"
    lenient = serve(opened, certificates(replace(shared().master(), tls_require_client_cert=False)))
    assert ask(lenient, bare) == "None"


def test_without_tls_nobody_shows_anything(opened: ExitStack) -> None:
    place = serve(opened, None)
    assert ask(place, None) == "None"
    assert ask(place, shared().client()) == "UNAVAILABLE"


def test_a_server_takes_up_its_new_certificate(opened: ExitStack, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    settings = cluster.server(CertificateSubject(MASTER), hosts=("elsewhere",))
    place = serve(opened, certificates(settings))
    client = cluster.client("red")
    assert ask(place, client) == "UNAVAILABLE"
    swap(settings, cluster.server(CertificateSubject(MASTER), hosts=HOSTS))
    assert [ask(place, client) for _ in range(2)] == [CertificateSubject(CLIENT, "red").uri()] * 2
