"""Tokens of a cluster: one TOML file at the master, and identification of a peer by its token.

    [tenants]                       # a token of role write
    red = "TOKEN"

    [[tenants.blue]]                # several of one tenant, each with a role, a digest in place of the token, an expiry
    sha256 = "HEX"
    role = "read"                   # read, write (the default) or admin
    expires = 2027-01-01T00:00:00Z

    [nodes]                         # join tokens by node name, "*" for a node of any name
    "*" = { sha256 = "HEX" }

    [instances]                     # of engines that report to the scheduler, by name or "*"
    [admins]                        # of operators, who belong to no tenant and cannot access blocks

Only digests are kept, and only at the master. Look-ups are by the digest of the token sent, so timing reveals nothing.
"""

import hashlib
import heapq
import hmac
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Any, Final

from kvstore.protocol.errors import ConfigError, Denied, Unauthorized
from kvstore.security.config_file import read_toml
from kvstore.security.identity import ANONYMOUS, Identity, IdentityKind, Role

MAX_FILE_BYTES: Final = 4 << 20
"""Enough for 30,000 tokens; a larger file is a mistake."""
SECTIONS: Final = {
    "tenants": IdentityKind.TENANT,
    "nodes": IdentityKind.NODE,
    "instances": IdentityKind.INSTANCE,
    "admins": IdentityKind.OPERATOR,
}
ANY_NAME: Final = "*"
MAX_ENDING: Final = 20
"""Tokens in `next_to_expire`."""
NO_TOKEN: Final = "no token is given: set --token or KVSTORE_CLIENT_TOKEN, to an operator's, or to a tenant's beside --tenant"
NO_TENANT: Final = "the token is not an operator's, and no tenant is given: set --tenant or KVSTORE_CLIENT_TENANT"
NODES_LINE: Final = '[nodes]\n"*" = "A JOIN TOKEN"   # `kvstore token new --node` makes one; each node is started with it as join_token'


def digest_of(token: str) -> bytes:
    """Return the SHA-256 of the token's UTF-8."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def credential_id(digest: bytes) -> str:
    """Return a token's id for logs and daemons, 16 hexadecimal digits: a keyed hash that does not reveal the digest."""
    return hmac.new(digest, b"kvstore credential id", hashlib.sha256).hexdigest()[:16]


class Credentials:
    """Tokens of one file, immutable. Threads may share it."""

    def __init__(self, identities: dict[tuple[bytes, str | None], Identity] | None = None) -> None:
        """`identities`: by digest, and tenant or None. Without any, authentication is off."""
        self._identities = identities or {}
        self._ids = {identity.credential: identity for identity in self._identities.values()}
        self._owners = {digest: identity for (digest, _tenant), identity in self._identities.items()}
        ending = (identity for identity in self._ids.values() if identity.expires_s != math.inf)
        self.next_to_expire: Final = tuple(heapq.nsmallest(MAX_ENDING, ending, key=lambda identity: identity.expires_s))
        """Identities of the MAX_ENDING tokens that expire first, in order."""

    @property
    def allows_anonymous(self) -> bool:
        return not self._identities

    def identify(self, tenant: str, token: str, *, now_s: float, certificate: Identity | None = None) -> Identity:
        """Return the identity of this token and tenant ("" for none).

        `certificate`: identity of the peer's verified certificate, which suffices without a token. Raises Unauthorized,
        with one text for an unknown tenant and a wrong token, so as not to reveal tenants; Denied if token and
        certificate are of different tenants.
        """
        if self.allows_anonymous:
            return ANONYMOUS
        if certificate is not None and not token:
            return certificate
        digest = digest_of(token)
        found = self._identities.get((digest, tenant)) or self._identities.get((digest, None))
        if found is None:
            if not token:
                raise Unauthorized(NO_TOKEN)
            raise Unauthorized(f"unknown tenant {tenant!r} or wrong token" if tenant else NO_TENANT)
        if found.expires_s <= now_s:
            raise Unauthorized(f"the token of {found} has expired: get a new one from the operator")
        if certificate is not None and not _agree(found, certificate):
            raise Denied(f"the certificate is of {certificate}, the token of {found}: use two of the same tenant")
        return replace(found, certificate=certificate.certificate) if certificate is not None else found

    def owner(self, token: str) -> Identity | None:
        """Return the token's identity, even if expired, one of them if several tenants share it.

        None for an unknown token.
        """
        return self._owners.get(digest_of(token))

    def holds(self, identity: Identity, *, now_s: float) -> bool:
        """Return True if the identity's token is still valid and unchanged.

        True for an identity without a token (by certificate).
        """
        if self.allows_anonymous or not identity.credential:
            return self.allows_anonymous is (identity.kind is IdentityKind.ANONYMOUS)
        return self._ids.get(identity.credential) == replace(identity, certificate=b"") and identity.expires_s > now_s

    def revoked_since(self, former: "Credentials") -> list[Identity]:
        """Return the identities of `former` that are missing or changed here."""
        return [identity for credential, identity in former._ids.items() if self._ids.get(credential) != identity]

    def identities(self) -> frozenset[Identity]:
        """Return the identities of all tokens."""
        return frozenset(self._ids.values())

    def has(self, kind: IdentityKind) -> bool:
        """Return True if the file has a token of this kind."""
        return any(identity.kind is kind for identity in self._identities.values())

    def __len__(self) -> int:
        return len(self._identities)


def _agree(token: Identity, certificate: Identity) -> bool:
    """Return True if a peer may use both. An operator's certificate matches every tenant, and an operator's token."""
    if certificate.kind is not IdentityKind.TENANT or (token.kind is IdentityKind.OPERATOR and certificate.role is Role.ADMIN):
        return True
    return (token.kind, token.name) == (certificate.kind, certificate.name)


def read_credentials(path: str, *, nodes_have_certificates: bool = False) -> Credentials:
    """Read the file; "": none, authentication is off.

    Raises ConfigError with the wrong section and key; also for a file without join tokens, unless nodes have
    certificates.
    """
    if not path:
        return Credentials()
    table = read_toml(path, "the tokens file", max_bytes=MAX_FILE_BYTES)
    if unknown := sorted(set(table) - set(SECTIONS)):
        raise ConfigError(
            f"the tokens file {path} has {', '.join(unknown)}: its sections are {', '.join(f'[{name}]' for name in SECTIONS)}"
        )
    found: dict[tuple[bytes, str | None], Identity] = {}
    for section, kind in SECTIONS.items():
        for entry in _entries(path, section, table.get(section, {})):
            if entry.key(kind) in found:
                raise ConfigError(
                    f"the tokens file {path}, {entry.place}: this token is in the file twice; use a different one for each entry"
                )
            found[entry.key(kind)] = entry.identity(kind)
    if not table.get("tenants"):
        raise ConfigError(f'the tokens file {path} needs a section [tenants] with lines NAME = "TOKEN"')
    credentials = Credentials(found)
    if not credentials.has(IdentityKind.NODE) and not nodes_have_certificates:
        raise ConfigError(f"by the tokens file {path} no node can join. Add:\n{NODES_LINE}")
    return credentials


@dataclass(frozen=True, slots=True)
class _CredentialEntry:
    place: str
    """Section and key, for errors."""
    name: str
    digest: bytes
    role: Role
    expires_s: float

    def key(self, kind: IdentityKind) -> tuple[bytes, str | None]:
        return self.digest, self.name if kind is IdentityKind.TENANT else None

    def identity(self, kind: IdentityKind) -> Identity:
        role = {IdentityKind.TENANT: self.role, IdentityKind.OPERATOR: Role.ADMIN}.get(kind, Role.NONE)
        name = "" if self.name == ANY_NAME and kind in (IdentityKind.NODE, IdentityKind.INSTANCE) else self.name
        return Identity(
            kind, role, name, credential_id(self.digest + (name.encode() if kind is IdentityKind.TENANT else b"")), self.expires_s
        )


def _entries(path: str, section: str, table: Any) -> Iterator[_CredentialEntry]:
    """Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(f'the tokens file {path}: {section} is a section; write [{section}] and below it NAME = "TOKEN"')
    for name, value in table.items():
        several = value if isinstance(value, list) else [value]
        for number, one in enumerate(several, start=1):
            place = f"[{section}] {name}" + (f", number {number}" if isinstance(value, list) else "")
            try:
                yield _entry(place, section, name, {"token": one} if isinstance(one, str) else one)
            except ConfigError as error:
                raise ConfigError(f"the tokens file {path}, {place}: {error}") from None


def _entry(place: str, section: str, name: str, table: Any) -> _CredentialEntry:
    known = ("token", "sha256", "expires", *(("role",) if section == "tenants" else ()))
    if not isinstance(table, dict) or set(table) - set(known) or ("token" in table) == ("sha256" in table):
        raise ConfigError(f'write "TOKEN", or a table with token or sha256, and where wanted {" and ".join(known[2:])}')
    role = Role.named(table.get("role", "write"))
    if role is None:
        raise ConfigError(f"role is {table['role']!r}: it is read, write or admin")
    return _CredentialEntry(place, name, _digest(table), role, _expires_s(table.get("expires")))


def _digest(table: dict[str, Any]) -> bytes:
    text = table.get("token", table.get("sha256"))
    if not isinstance(text, str) or not text:
        raise ConfigError("a token is a text that is not empty")
    if "token" in table:
        return digest_of(text)
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError("sha256 is the token's SHA-256, 64 hexadecimal digits")
    return digest


def _expires_s(value: Any) -> float:
    if value is None:
        return math.inf
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.timestamp()
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    raise ConfigError(f"expires is {value!s}: write a day, 2027-01-31 (its beginning, UTC), or a time with its zone, 2027-01-31T12:00:00Z")
