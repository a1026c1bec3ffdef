"""Catalog records of weight versions and of the namespaces of their blocks. Pure.

    key                                        value
    b"w" + 16 bytes                            <u8 version>, tenant, base, adapter, salt, version, <u64 ms> began, <u64 ms> last report,
                                               <u8>: 1 in use, 2 retired by an operator; <u32> number of users and their names
    b"i" + u8 tenant length + tenant + id      the 16 bytes of the version of its blocks, <u32 length> model, <u32 length> the
                                               namespace's form: canonical, with a digest in place of the salt

The 16 bytes are a hash of the version's five texts, which together exceed a catalog's key. Texts are a u32 length
and UTF-8."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from kvstore.master.catalogs.interface import Op
from kvstore.protocol.errors import Corrupt, ProtocolError
from kvstore.protocol.wire import Reader, Writer

FORM: Final = 1
DIGEST_BYTES: Final = 16
_IN_USE, _RETIRED = 1, 2


class Weights(NamedTuple):
    """Weights whose versions are ordered: a base, an adapter ("": none) and a digest of the salt ("": none)."""

    tenant: str
    base: str
    adapter: str = ""
    salt: str = ""


class WeightsVersion(NamedTuple):
    """One version of weights; "" is that of the files."""

    weights: Weights
    version: str = ""


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """A version of weights. `began_ms` is its last begin of use, `used_ms` its last report, by the wall clock.
    `users` are the current ones if `is_in_use`, else the last."""

    key: WeightsVersion
    began_ms: int
    used_ms: int
    is_in_use: bool
    is_retired: bool
    users: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A namespace of blocks. `version` is the digest of its version; `model` is stored beside the form, which is
    slow to parse."""

    tenant: str
    id: bytes
    version: bytes
    model: str
    form: bytes


def put_weights(record: WeightsRecord) -> Op:
    weights, version = record.key
    writer = Writer().u8(FORM)
    for text in (*weights, version):
        writer.text(text)
    writer.u64(record.began_ms).u64(record.used_ms).u8(record.is_in_use * _IN_USE | record.is_retired * _RETIRED).u32(len(record.users))
    for user in record.users:
        writer.text(user)
    return Op(b"w" + digest(record.key), writer.done())


def delete_weights(key: WeightsVersion) -> Op:
    return Op(b"w" + digest(key), None)


def put_namespace(record: NamespaceRecord) -> Op:
    return Op(_namespace_key(record.tenant, record.id), record.version + Writer().text(record.model).blob(record.form).done())


def delete_namespace(tenant: str, id: bytes) -> Op:
    return Op(_namespace_key(tenant, id), None)


def read_weights(key: bytes, value: bytes) -> WeightsRecord:
    """Raises Corrupt."""
    try:
        reader = Reader(value)
        if (form := reader.u8()) != FORM:
            raise Corrupt(f"the catalog's record {key!r} has form {form}, this release reads {FORM}")
        weights = Weights(reader.text(), reader.text(), reader.text(), reader.text())
        version, began_ms, used_ms, flags = reader.text(), reader.u64(), reader.u64(), reader.u8()
        users = tuple(reader.text() for _ in range(reader.u32()))
        reader.end()
    except ProtocolError as error:
        raise Corrupt(f"the catalog's record {key!r} is damaged: {error}") from None
    found = WeightsVersion(weights, version)
    return WeightsRecord(found, began_ms, used_ms, bool(flags & _IN_USE), bool(flags & _RETIRED), users)


def read_namespace(tenant: str, id: bytes, key: bytes, value: bytes) -> NamespaceRecord:
    """Raises Corrupt."""
    try:
        reader = Reader(value[DIGEST_BYTES:])
        model = reader.text()
        form = reader.blob()
        reader.end()
    except ProtocolError as error:
        raise Corrupt(f"the catalog's record {key!r} is damaged: {error}") from None
    return NamespaceRecord(tenant, id, value[:DIGEST_BYTES], model, form)


def digest(key: WeightsVersion) -> bytes:
    """Return the 16 bytes that a version's record is stored under."""
    writer = Writer()
    for text in (*key.weights, key.version):
        writer.text(text)
    return xxhash.xxh3_128_digest(writer.done())


def _namespace_key(tenant: str, id: bytes) -> bytes:
    name = tenant.encode()
    return b"i" + bytes([len(name)]) + name + id
