"""Tests of factory.py."""

import re
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.master.catalogs.factory import FORMS, make_catalog
from kvstore.master.catalogs.interface import Op
from kvstore.master.catalogs.memory import MemoryCatalog
from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.config import TlsSettings
from tests.etcd_server import EtcdServer
from tests.master.catalogs.conformance import OPEN_DEADLINE_S, commit, elected


def test_memory_makes_a_memory_catalog() -> None:
    assert isinstance(make_catalog("memory:"), MemoryCatalog)


def test_lmdb_makes_a_catalog_in_the_folder(tmp_path: Path) -> None:
    catalog = make_catalog(f"lmdb:{tmp_path}/records")
    catalog.open(deadline_s=OPEN_DEADLINE_S)
    catalog.close()
    assert (tmp_path / "records" / "data.mdb").exists()


@pytest.mark.parametrize("slash", ["", "/"])
def test_etcd_makes_a_catalog_under_the_prefix(etcd_url: str, slash: str) -> None:
    url = f"{etcd_url}/{uuid.uuid4()}"
    former, other = make_catalog(url), make_catalog(f"{etcd_url}/{uuid.uuid4()}")
    elected(former)
    assert commit(former, Op(b"a", b"1")) is None
    assert elected(other).records == {}
    former.close()
    successor = make_catalog(url + slash)
    assert elected(successor).records == {b"a": b"1"}
    for catalog in (other, successor):
        catalog.close()


def test_etcd_takes_tls_files_and_a_login(etcd: EtcdServer, tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text("PEM")
    (tmp_path / "password").write_text("secret\n")
    files = "&".join(f"{name}={tmp_path / name}" for name in ("ca", "cert", "key"))
    make_catalog(f"etcd://{etcd.host_port}/p?{files}&user=root&password_file={tmp_path / 'password'}").close()


def test_etcds_uses_the_masters_own_certificates(etcd_server_factory: Callable[..., EtcdServer]) -> None:
    """Against a real etcd that asks for a client's certificate."""
    server = etcd_server_factory(tls=True)
    cert, key = map(str, server.certificate)
    own = TlsSettings(tls_ca=cert, tls_cert=cert, tls_key=key)
    with closing(make_catalog(f"etcds://{server.host_port}", tls=own, lease_ttl_s=20.0)) as catalog:
        assert elected(catalog).records == {}
        assert commit(catalog, Op(b"a", b"1")) is None
    other = TlsSettings(tls_ca="/of/something/else")
    with closing(make_catalog(f"etcds://{server.host_port}?ca={cert}&cert={cert}&key={key}", tls=other, lease_ttl_s=20.0)) as named:
        assert elected(named).records == {b"a": b"1"}


def test_etcds_without_an_authority_is_refused() -> None:
    for tls in (None, TlsSettings()):
        with pytest.raises(ConfigError, match="etcds:// needs tls_ca, or"):
            make_catalog("etcds://localhost:2379", tls=tls)


@pytest.mark.parametrize("url", ["", "memory", "memory:x", "lmdb:", "etcd:", "etcd:/x", "redis://localhost:6379", "/var/lib/kvstore"])
def test_an_unknown_form_is_a_config_error_that_tells_the_three(url: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(FORMS)):
        make_catalog(url)


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        *((hosts, "not an etcd endpoint HOST:PORT") for hosts in ("", "host", "host:", "host:0", "host:port", "a:1,", "::1:2379", "a b:1")),
        ("a:1?ca", "not NAME=VALUE"),
        ("a:1?tls=1", "'tls' is not an etcd setting"),
        ("a:1?password=secret", "'password' is not an etcd setting"),
        ("a:1?ca=/absent.pem", "absent.pem: No such file"),
        ("a:1?user=root", "both a user and a password"),
        ("a:1?user=root&password_file=/absent", "cannot read the password in /absent"),
        (f"a:1/{'p' * 100}", "prefix is longer than 100 bytes"),
    ],
)
def test_a_malformed_address_of_etcd_is_a_config_error(rest: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_catalog(f"etcd://{rest}")


@pytest.mark.parametrize("kind", ["lmdb", "etcd"])
def test_partitions_have_own_catalogs_and_a_fixed_number(kind: str, etcd_url: str, tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path}/records" if kind == "lmdb" else f"{etcd_url}/{uuid.uuid4()}"
    catalogs = [make_catalog(url, partition=partition, partitions=3) for partition in range(3)]
    for number, catalog in enumerate(catalogs):
        assert elected(catalog).records == {}
        assert commit(catalog, Op(b"a", b"%d" % number)) is None
    for catalog in catalogs:
        catalog.close()
    for number in range(3):
        catalog = make_catalog(url, partition=number, partitions=3)
        assert elected(catalog).records == {b"a": b"%d" % number}
        catalog.close()
    for count in (1, 2):
        catalog = make_catalog(url, partitions=count)
        with pytest.raises(ConfigError, match=f"a key space of 3 partitions, and the setting `partitions` is {count}"):
            catalog.open(deadline_s=OPEN_DEADLINE_S)
        catalog.close()


@pytest.mark.parametrize("kind", ["lmdb", "etcd"])
def test_a_catalog_of_one_partition_is_not_cut_later(kind: str, etcd_url: str, tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path}/records" if kind == "lmdb" else f"{etcd_url}/{uuid.uuid4()}"
    whole = make_catalog(url)
    elected(whole)
    whole.close()
    cut = make_catalog(url, partitions=2)
    with pytest.raises(ConfigError, match="a key space of 1 partitions, and the setting `partitions` is 2"):
        cut.open(deadline_s=OPEN_DEADLINE_S)
    cut.close()
