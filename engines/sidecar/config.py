"""The settings of kvstore-sidecar. What they do is in docs/engines.md."""

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
    """See docs/settings.md, which is made from this."""

    engine: str = setting("http://127.0.0.1:8000", "The engine's address: its /metrics are read, and requests are sent there.")
    advertise: str = setting("", "The URL that routers send requests to; default: that of engine.")
    events: str = setting("", "Where the engine publishes its KV events, tcp://HOST:PORT; default: what it has itself is not told.")
    events_replay: str = setting("", "Where it replays them, tcp://HOST:PORT; default: nowhere, so that a gap makes all void.")
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
    name: str = setting("", "Name of the instance, unlike all others'; default: the engine's address.")
    role: str = setting("both", "What the engine does for a request: prefill, decode, or both.", choices=ROLES)
    node: str = setting("", "Name of the storage node that its blocks are put to; default: it has none but its own.")
    namespace_id: str = shared_settings.NAMESPACE_ID()
    model: str = shared_settings.MODEL()
    dtype: str = shared_settings.DTYPE()
    block_tokens: int = shared_settings.BLOCK_TOKENS(default=16)
    deadline_s: float = setting(
        2.0,
        "Time for an answer: of the engine's metrics, a replay of its events, the master. An engine without an answer gets no requests.",
        minimum=0.01,
        maximum=60,
    )


def check_settings(settings: SidecarSettings) -> None:
    """Raises ConfigError for what no single setting can be blamed for alone."""
    if settings.events and not settings.namespace_id and not settings.model:
        raise ConfigError(
            "no model is named: the engine's blocks are called by it; give --model NAME as the router has it, or --namespace-id ID"
        )
    if settings.events_replay and not settings.events:
        raise ConfigError("events_replay without events: say where the engine publishes what it replays")
