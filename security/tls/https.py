"""The certificate of an HTTP port, for browsers and for who scrapes metrics: TLS 1.2 and up, and nobody need show one of his own.

It is apart from that of a daemon's other connections (certificates.py), since those who look at a port are no part of the cluster and trust
other authorities. New connections have what the files hold; what cannot be used is logged, and the former goes on.
"""

import logging
import ssl
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.security.config_file import signature
from kvstore.security.tls.pem_files import load_pair

SETTINGS: Final = "http_tls_cert and http_tls_key"
log = logging.getLogger("kvstore.security")


class HttpsCertificate:
    """See the module. Not thread-safe."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises ConfigError: one of the files is missing, or cannot be used."""
        self._cert, self._key = cert, key
        self._seen = self._signature()
        self.context = self._loaded()
        """Of new connections; it stays the same object."""

    @classmethod
    def of(cls, cert: str, key: str) -> "HttpsCertificate | None":
        """None where neither file is named. Raises ConfigError."""
        if bool(cert) != bool(key):
            raise ConfigError(f"{SETTINGS} go together: set both, or neither")
        return cls(cert, key) if cert else None

    def look(self) -> None:
        """Use what the files hold now."""
        found = self._signature()
        if found == self._seen:
            return
        self._seen = found  # of files that cannot be used, too: they are told of once
        try:
            self._loaded()  # by itself first: a pair that does not match would leave the context in use without a key
            load_pair(self.context, self._cert, self._key, settings=SETTINGS)
        except ConfigError as error:
            log.warning("the HTTP port's certificate has changed and cannot be used, the former goes on: %s", error)
        else:
            log.info("the HTTP port's certificate has changed and is in use")

    def _signature(self) -> tuple[object, object]:
        return signature(self._cert), signature(self._key)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_pair(context, self._cert, self._key, settings=SETTINGS)
        return context
