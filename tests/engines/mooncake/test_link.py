"""Setting up, names of keys, registered memory, and what is said without a cluster."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.engines.mooncake import link
from kvstore.engines.mooncake.link import _warn_of_weights
from kvstore.engines.mooncake.store import MooncakeDistributedStore
from kvstore.security.tls.config import tls_values
from tests.client.processes import Cluster, cluster
from tests.engines.mooncake.conftest import Opened
from tests.engines.mooncake.memory import Room
from tests.security.tls.certified import Cluster as Authority
from tests.security.tls.certified import flags
from tests.system.running import System


def test_a_dictionary_sets_up_as_arguments_do(running: Cluster) -> None:
    store = MooncakeDistributedStore()
    for size in ("16MB", "16 MB", 16 << 20):
        config = {
            "local_hostname": "h",
            "metadata_server": "P2PHANDSHAKE",
            "local_buffer_size": size,
            "master_server_addr": running.address,
        }
        assert store.setup(config) == 0
        assert store.put("key", b"value") == 0
    assert store.setup({**config, "global_segment_size": "50%"}) == -600
    assert store.setup(config={"local_hostname": "h", "metadata_server": "m", "master_server_address": running.address}) == 0
    assert store.init_all("tcp", "") == -600
    assert store.setup_dummy(1 << 20, 1 << 20, running.address) == 0
    assert store.get("key") == b"value"
    assert store.remove_all(force=True) == 1
    store.close()


def test_a_hosts_name_has_a_port(running: Cluster) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("me", "", 0, 0, "tcp", "", running.address) == 0
    host, port = store.get_hostname().split(":")
    assert host == "me"
    assert 12300 <= int(port) <= 14300
    store.setup("me:7", "", 0, 0, "tcp", "", running.address)
    assert store.get_hostname() == "me:7"
    store.close()


def test_nobody_there_is_a_code_and_every_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ATTEMPT_S", 0.1)
    store = MooncakeDistributedStore()
    assert store.setup("me", "", 0, 1 << 20, "tcp", "", "127.0.0.1:1") == -1
    assert store.setup("me:1", "", 0, 1 << 20, "tcp", "", "127.0.0.1:1") == -600
    assert store.health_check() == 1
    room = Room(1)
    assert store.put("key", b"value") == -600
    assert store.batch_put_from(["a", "b"], [room.at, room.at], [1, 1]) == [-600, -600]
    assert store.upsert("key", b"value") == -600
    assert (store.get("key"), store.get_batch(["a", "b"]), store.get_buffer("key"), store.get_tensor("key")) == (
        b"",
        [b"", b""],
        None,
        None,
    )
    assert store.get_into("key", room.at, 1) == -600
    assert (store.is_exist("key"), store.batch_is_exist(["a"]), store.get_size("key")) == (-600, [-600], -600)
    assert (store.remove("key"), store.remove_all()) == (-600, -600)
    assert store.get_replica_desc("key") == []
    assert store.register_buffer(room.at, 1) == -600
    assert store.close() == 0


def test_a_master_that_is_gone_is_unhealthy(tmp_path: Path) -> None:
    with cluster(tmp_path) as started:
        store = MooncakeDistributedStore()
        assert store.setup("me", "", 0, 0, "tcp", "", started.address) == 0
        assert store.health_check() == 0
        started.master.stop()
        assert store.health_check() == 2
        store.close()


def test_tenants_keys_never_meet(store: MooncakeDistributedStore, opened: Opened) -> None:
    """No key of the default tenant reaches another tenant's objects."""
    with pytest.raises(AssertionError):
        opened(tenant_id="a\0b")  # else its keys could be those of tenant a
    other = opened(tenant_id="other")
    assert other.put("key", b"theirs") == 0
    mine = ["other\0key", "\0other\0key", "\0", "key"]
    assert store.batch_is_exist(mine) == [0, 0, 0, 0]
    assert store.put_batch(mine, [b"1", b"2", b"3", b"4"]) == 0
    assert store.get_batch(mine) == [b"1", b"2", b"3", b"4"]
    assert other.get("key") == b"theirs"
    assert store.remove_by_regex("^other\0key$") == 1
    assert store.batch_is_exist(mine) == [0, 1, 1, 1]
    assert other.remove_by_regex("^key$") == 1
    assert (store.get("key"), other.get("key")) == (b"4", b"")


def test_long_keys_are_told_apart_and_no_key_is_refused(store: MooncakeDistributedStore) -> None:
    keys = ["x" * 1000 + end for end in ("a", "b")] + ["é" * 200]
    assert store.put_batch(keys, [b"1", b"2", b"3"]) == 0
    assert store.get_batch(keys) == [b"1", b"2", b"3"]
    assert store.put("", b"value") == -600


def test_memory_is_registered_once(store: MooncakeDistributedStore) -> None:
    room = Room(100)
    assert store.register_buffer(room.at, 100) == 0
    assert [store.register_buffer(room.at + at, 10) for at in (0, 10, 95)] == [-600] * 3
    assert store.unregister_buffer(room.at + 10) == -600
    assert (store.unregister_buffer(room.at), store.unregister_buffer(room.at)) == (0, -600)
    assert (store.register_buffer(0, 1), store.register_buffer(room.at, 0)) == (-600, -600)
    assert store.register_buffer(room.at, 10) == 0


def test_setup_waits_for_its_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ATTEMPT_S", 60)
    with cluster(tmp_path) as started, ThreadPoolExecutor() as pool:
        started.start_node("--dram", "16MiB")
        started.master.stop()
        store = MooncakeDistributedStore()
        setup = pool.submit(store.setup, "me:1", "", 0, 1 << 20, "tcp", "", started.address)
        with pytest.raises(TimeoutError):
            setup.result(2 * link.PAUSE_S)
        started.start_master()
        assert setup.result(60) == 0
        store.close()


def test_empty_key_is_a_miss_and_not_stored(store: MooncakeDistributedStore) -> None:
    assert (store.put("", b"value"), store.upsert("", b"value"), store.put("\0", b"value")) == (-600, -600, 0)
    assert (store.is_exist(""), store.get_size(""), store.remove(""), store.get("")) == (0, -704, -704, b"")


def test_register_buffer_warns_of_weights_once(store: MooncakeDistributedStore, caplog: pytest.LogCaptureFixture) -> None:
    """A process that registers memory is an engine, as a rule."""
    _warn_of_weights.cache_clear()
    room = Room(100)
    for _ in range(2):
        assert store.register_buffer(room.at, 100) == 0
        assert store.unregister_buffer(room.at) == 0
    assert [message for message in caplog.messages if "not its weights" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_what_was_put_is_there_for_any_client(store: MooncakeDistributedStore, running: Cluster) -> None:
    assert store.put("shared", b"value") == 0
    with Client(running.address) as client:
        assert client.get(b"shared") == b"value"


@pytest.mark.parametrize("call", ["put", "upsert"])
def test_an_argument_that_is_unknown_is_a_type_error(store: MooncakeDistributedStore, call: str) -> None:
    with pytest.raises(TypeError):
        getattr(store, call)(key="key", value=b"", no_such_argument=1)


def test_settings_beyond_mooncake_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of mutual TLS: its certificate, its tenant."""
    with System(tmp_path) as system:
        authority = Authority(tmp_path / "certs")
        system.start_master(0, *flags(authority.master()))
        system.start_node("n0", "--dram", "16MiB", *flags(authority.node("n0")))
        store = MooncakeDistributedStore()
        assert store.setup("me", "", 0, 1 << 20, "tcp", "", system.address) != 0
        for name, value in {"tenant": "red", **tls_values(authority.client("red"))}.items():
            monkeypatch.setenv(f"KVSTORE_CLIENT_{name.upper()}", str(value))
        assert store.setup("me", "", 0, 1 << 20, "tcp", "", system.address) == 0
        assert store.put("key", b"value") == 0
        assert store.get("key") == b"value"
        assert store.remove_by_regex("k", force=True) == 1
        monkeypatch.setenv("KVSTORE_CLIENT_TLS_CA", "/absent.pem")
        assert store.setup("me", "", 0, 1 << 20, "tcp", "", system.address) != 0
        store.close()
