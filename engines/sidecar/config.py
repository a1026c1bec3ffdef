"""Settings of kvstore-sidecar; docs/engines.md explains them."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol import shared_settings
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import setting
from kvstore.security.tls.config import TlsSettings

SECTION: Final = "sidecar"
ROLES: Final = ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class SidecarSettings(TlsSettings):
    """Settings of the daemon. docs/settings.md is generated from this class."""

    engine: str = setting("http://127.0.0.1:8000", "The engine's address: its /metrics are read, and requests are sent there.")
    advertise: str = setting("", "The URL that routers send requests to; default: that of engine.")
    events: str = setting("", "Where the engine publishes its KV events, tcp://HOST:PORT; default: its own blocks are not reported.")
    events_replay: str = setting("", "Where it replays them, tcp://HOST:PORT; default: no replay, so a gap drops all of its blocks.")
    master: str = shared_settings.MASTER()
    http: str = shared_settings.HTTP()
    http_token_file: str = shared_settings.HTTP_TOKEN_FILE()
    http_tls_cert: str = shared_settings.HTTP_TLS_CERT()
    http_tls_key: str = shared_settings.HTTP_TLS_KEY()
    log_level: str = shared_settings.LOG_LEVEL()
    log_format: str = shared_settings.LOG_FORMAT()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    instance_token: str = shared_settings.INSTANCE_TOKEN()
    name: str = setting("", "Unique name of the instance; default: the engine's address.")
    role: str = setting("both", "What the engine does for a request: prefill, decode, or both.", choices=ROLES)
    node: str = setting("", "Name of the storage node that its blocks are put to; default: none.")
    namespace_id: str = shared_settings.NAMESPACE_ID()
    model: str = shared_settings.MODEL()
    dtype: str = shared_settings.DTYPE()
    block_tokens: int = shared_settings.BLOCK_TOKENS(default=16)
    deadline_s: float = setting(
        2.0,
        "Deadline of the engine's metrics, a replay of its events, and the master. An engine that misses it gets no requests.",
        minimum=0.01,
        maximum=60,
    )


def check_settings(settings: SidecarSettings) -> None:
    """Check combinations of settings. Raises ConfigError."""
    if settings.events and not settings.namespace_id and not settings.model:
        raise ConfigError("events needs a model to name blocks: set --model NAME as in the router, or --namespace-id ID")
    if settings.events_replay and not settings.events:
        raise ConfigError("events_replay is set without events: set --events to where the engine publishes")
