"""telemetry/http/listener.py: advertised addresses, and one clear error if the server cannot listen."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.telemetry.http.listener import host_port, listening, reached_at, url_of
from tests.entering import enter_network
from tests.namespaces import run, two_hosts


def test_it_listens_where_it_says() -> None:
    with listening("127.0.0.1:0") as listener:
        host, _, port = host_port(listener).rpartition(":")
        with socket.create_connection((host, int(port))):
            pass


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_an_ipv6_address_is_in_brackets() -> None:
    with listening("[::1]:0") as listener:
        assert host_port(listener).startswith("[::1]:")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_every_interface_of_ipv6_is_every_interface_of_ipv4_too() -> None:
    with listening("[::]:0") as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port)):
                pass


def test_without_ipv4_its_loopback_is_that_of_ipv6() -> None:
    with two_hosts(0) as hosts, ThreadPoolExecutor(1, initializer=enter_network, initargs=(hosts.names[0],)) as elsewhere:
        run(["ip", "-n", hosts.names[0], "-4", "address", "flush", "dev", "lo"])
        with elsewhere.submit(listening, "127.0.0.1:0").result() as listener:
            assert host_port(listener).startswith("[::1]:")


def test_where_nobody_can_listen_is_one_clear_error() -> None:
    with listening("127.0.0.1:0") as listener:
        taken = host_port(listener)
        with pytest.raises(ConfigError, match=f"cannot listen on {taken}: Address already in use"):
            listening(taken)
    with pytest.raises(ConfigError, match="cannot listen on unix:/x: HTTP is served on HOST:PORT only"):
        listening("unix:/x")
    with pytest.raises(InvalidArgument, match="'nowhere' is not an address"):
        listening("nowhere")


def test_wildcard_listener_advertises_the_host() -> None:
    assert reached_at("127.0.0.1:5", "there") == "127.0.0.1:5"
    assert reached_at("0.0.0.0:5", "there") == "there:5"
    assert reached_at("[::]:5", "fe80::1") == "[fe80::1]:5"
    assert reached_at("0.0.0.0:5", "::") == reached_at("0.0.0.0:5", "") == ""


def test_what_is_told_of_a_port_is_asked_by_what_it_speaks() -> None:
    assert url_of("127.0.0.1:5") == "http://127.0.0.1:5"
    assert url_of("https://there:5") == "https://there:5"
