"""Parser of catalog addresses, as in `--catalog`. It opens and connects to nothing, but reads the files that an address
names.

    memory:
    lmdb:PATH
    etcd://HOST:PORT[,HOST:PORT...][/PREFIX][?ca=FILE&cert=FILE&key=FILE&user=NAME&password_file=FILE]
    etcds://... the same over TLS, by default with the master's own tls_ca, tls_cert and tls_key"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

from kvstore.master.catalogs.interface import Catalog
from kvstore.master.catalogs.lmdb import LmdbCatalog
from kvstore.master.catalogs.memory import MemoryCatalog
from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.config import TlsSettings

if TYPE_CHECKING:
    from kvstore.master.catalogs.etcd.catalog import EtcdCatalog
    from kvstore.master.catalogs.etcd.channel import EtcdAccess

FORMS = "memory:  lmdb:PATH  etcd[s]://HOST:PORT,HOST:PORT[/PREFIX][?ca=FILE&cert=FILE&key=FILE&user=NAME&password_file=FILE]"
DEFAULT_PREFIX = "/kvstore"
MAX_PREFIX_BYTES = 100
ETCD_SETTINGS = ("ca", "cert", "key", "user", "password_file")

_ENDPOINT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def make_catalog(
    url: str,
    *,
    partition: int = 0,
    partitions: int = 1,
    lease_ttl_s: float = 2.0,
    compact_interval_s: float = 60.0,
    quota_bytes: int = 2 << 30,
    tls: TlsSettings | None = None,
) -> Catalog:
    """Return the catalog of `partition` at `url`, not yet opened. Raises ConfigError; for a wrong form it lists the
    valid ones.

    The other parameters are etcd's: the owner's lease, the history kept, and the quota it was started with. A
    password is read from a file, since every user of the machine can read a command line."""
    scheme, _colon, rest = url.partition(":")
    if url == f"{MemoryCatalog.scheme}:":
        return MemoryCatalog()
    if scheme == LmdbCatalog.scheme and rest:
        return LmdbCatalog(Path(rest, f"partition-{partition}") if partition else Path(rest), partitions=partitions)
    if scheme in ("etcd", "etcds") and rest.startswith("//"):
        files = _own_files(tls or TlsSettings()) if scheme == "etcds" else None
        bounds = compact_interval_s, quota_bytes
        return _etcd(rest.removeprefix("//"), files, lease_ttl_s, bounds, (partition, partitions))
    raise ConfigError(f"catalog {url!r} is not one of: {FORMS}")


def _etcd(
    rest: str, files: Mapping[str, str] | None, lease_ttl_s: float, bounds: tuple[float, int], which: tuple[int, int]
) -> "EtcdCatalog":
    # Imported here: etcd's messages take a sixth of a master's start, which other catalogs do not need.
    from kvstore.master.catalogs.etcd.catalog import EtcdCatalog, EtcdTiming
    from kvstore.master.catalogs.etcd.maintenance import MaintenanceLimits

    place, _mark, query = rest.partition("?")
    hosts, slash, path = place.partition("/")
    prefix = (slash + unquote(path)).rstrip("/") or DEFAULT_PREFIX
    if len(prefix.encode()) > MAX_PREFIX_BYTES:
        raise ConfigError(f"catalog: the etcd prefix is longer than {MAX_PREFIX_BYTES} bytes")
    partition, partitions = which
    return EtcdCatalog(
        _endpoints(hosts),
        prefix=prefix,
        partition=partition,
        partitions=partitions,
        access=_access(query, files),
        timing=EtcdTiming(lease_ttl_s),
        bounds=MaintenanceLimits(*bounds),
    )


def _endpoints(hosts: str) -> Sequence[str]:
    endpoints = hosts.split(",")
    for endpoint in endpoints:
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None or not 0 < int(found[1]) < 65_536:
            raise ConfigError(f"catalog: {endpoint!r} is not an etcd endpoint HOST:PORT; the form is one of: {FORMS}")
    return endpoints


def _access(query: str, own_files: Mapping[str, str] | None) -> "EtcdAccess":
    from kvstore.master.catalogs.etcd.channel import EtcdAccess

    try:
        settings = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    except ValueError as error:
        raise ConfigError(f"catalog: etcd settings {query!r} are not NAME=VALUE&NAME=VALUE") from error
    for name in settings:
        if name not in ETCD_SETTINGS:
            raise ConfigError(f"catalog: {name!r} is not an etcd setting; there are {', '.join(ETCD_SETTINGS)}")
    if own_files is not None:
        settings = {**own_files, **settings} if not {"ca", "cert", "key"} & set(settings) else settings
        if "ca" not in settings:
            raise ConfigError("catalog: etcds:// needs tls_ca, or ?ca=FILE, the authority of etcd's certificate")
    files = {name: Path(settings[name]) if name in settings else None for name in ("ca", "cert", "key")}
    return EtcdAccess(**files, user=settings.get("user"), password=_password(settings.get("password_file")))


def _own_files(tls: TlsSettings) -> dict[str, str]:
    """Return the master's TLS files, by the names of etcd's settings."""
    found = {"ca": tls.tls_ca, "cert": tls.tls_cert, "key": tls.tls_key}
    return {name: file for name, file in found.items() if file}


def _password(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"catalog: cannot read the password in {file}: {error}") from error
