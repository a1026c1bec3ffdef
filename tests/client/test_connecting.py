"""Promise of connecting.py."""

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.connecting import connect
from kvstore.protocol.errors import Unavailable
from tests.client.embedded import embedded
from tests.ports import free_ports


def test_the_client_is_of_the_settings_cluster_and_tenant() -> None:
    with embedded() as cluster:
        with connect(ClientSettings(master=cluster.address, tenant="red")) as red:
            red.put(b"key", b"red")
        with connect(ClientSettings(master=cluster.address, tenant="blue")) as blue:
            assert blue.get(b"key") is None


def test_an_unreachable_master_is_known_within_the_deadline() -> None:
    with connect(ClientSettings(master=f"127.0.0.1:{free_ports(1)[0]}", deadline_s=5)) as client, pytest.raises(Unavailable):
        client.exists(b"key")
