"""The settings of kvstore-publisher. What they do is in docs/engines.md."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.settings import setting
from kvstore.protocol.variables import MASTER
from kvstore.security.tls.config import TlsSettings
from kvstore.security.tls.https import CERT_HELP, KEY_HELP
from kvstore.telemetry.http.opening import HTTP_DEFAULT, HTTP_HELP, HTTP_TOKEN_FILE_HELP
from kvstore.telemetry.logs.writing import FORMAT_HELP, FORMATS, LEVEL_HELP, LEVELS

SECTION: Final = "publisher"


@dataclass(frozen=True, slots=True)
class PublisherSettings(TlsSettings):
    """See docs/settings.md, which is made from this."""

    master: str = setting("127.0.0.1:7440", "Addresses of the masters, HOST:PORT, comma separated.", variable=MASTER)
    tenant: str = setting("", "The tenant whose blocks are told of.")
    token: str = setting("", "The tenant's token.")
    events: str = setting("tcp://127.0.0.1:5557", "Where events are published, as ZeroMQ has it: tcp://HOST:PORT.")
    events_replay: str = setting("tcp://127.0.0.1:5558", "Where missed events are asked for; empty: nowhere.")
    topic: str = setting("", "First part of each message, by which subscribers choose.")
    kept_batches: int = setting(10_000, "Batches that can be asked for again.", minimum=0, maximum=10_000_000)
    poll_interval_s: float = setting(0.1, "How often nodes are asked what has happened.", minimum=0.001, maximum=60)
    http: str = setting(HTTP_DEFAULT, HTTP_HELP)
    http_token_file: str = setting("", HTTP_TOKEN_FILE_HELP)
    http_tls_cert: str = setting("", CERT_HELP)
    http_tls_key: str = setting("", KEY_HELP)
    log_level: str = setting("info", LEVEL_HELP, choices=LEVELS)
    log_format: str = setting("text", FORMAT_HELP, choices=FORMATS)
