"""A certificate and its key, loaded from their files."""

import ssl
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.security.file_signature import signature

ATTEMPTS: Final = 5
"""At files that are exchanged while they are read: both may be one file, which is read twice."""


def load_pair(context: ssl.SSLContext, cert: str, key: str, *, settings: str) -> None:
    """Have `context` show the certificate in the file `cert`, whose key is in `key`; `settings` is what named them.

    Raises ConfigError: they cannot be used.
    """
    attempt = 1
    while True:
        seen = signature(cert), signature(key)
        try:
            return context.load_cert_chain(cert, key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            if attempt == ATTEMPTS or (signature(cert), signature(key)) == seen:
                reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
                raise ConfigError(f"{settings}: {cert} and {key} are no certificate and its key in PEM ({reason.lower()})") from None
        attempt += 1


def _no_password() -> str:
    raise ValueError("the key is encrypted, and a daemon has nobody to ask for the password")
