"""Certificate of an HTTP port, for browsers and metrics scrapers: TLS 1.2 and up, without client certificates.

It is separate from certificates.py, because HTTP clients are not part of the cluster and trust other authorities. New
connections use the current files; an unusable file is logged, and the former content stays in use.
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
    """Reloading TLS context of an HTTP port. Not thread-safe."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises ConfigError: a file is missing or unusable."""
        self._cert, self._key = cert, key
        self._seen = self._signature()
        self.context = self._loaded()
        """Context of new connections, always the same object."""

    @classmethod
    def of(cls, cert: str, key: str) -> "HttpsCertificate | None":
        """Return the certificate, or None if neither file is set. Raises ConfigError."""
        if bool(cert) != bool(key):
            raise ConfigError(f"{SETTINGS} go together: set both, or neither")
        return cls(cert, key) if cert else None

    def look(self) -> None:
        """Reload the files if they have changed."""
        found = self._signature()
        if found == self._seen:
            return
        self._seen = found  # also of unusable files, so that they are logged once
        try:
            self._loaded()  # into a new context first: a mismatched pair would leave the current one without a key
            load_pair(self.context, self._cert, self._key, settings=SETTINGS)
        except ConfigError as error:
            log.warning("the HTTP port's changed certificate cannot be used, the former stays in use: %s", error)
        else:
            log.info("the HTTP port's certificate has changed and is in use")

    def _signature(self) -> tuple[object, object]:
        return signature(self._cert), signature(self._key)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_pair(context, self._cert, self._key, settings=SETTINGS)
        return context
