"""The settings of kvstore-sidecar. What they do is in docs/engines.md."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import setting
from kvstore.protocol.variables import MASTER
from kvstore.security.tls.config import TlsSettings
from kvstore.security.tls.https import CERT_HELP, KEY_HELP
from kvstore.telemetry.http.server import HTTP_DEFAULT, HTTP_HELP, HTTP_TOKEN_FILE_HELP
from kvstore.telemetry.logs import FORMAT_HELP, FORMATS, LEVEL_HELP, LEVELS

SECTION: Final = "sidecar"
ROLES: Final = ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class SidecarSettings(TlsSettings):
    """See docs/settings.md, which is made from this."""

    engine: str = setting("http://127.0.0.1:8000", "The engine's address: its /metrics are read, and requests are sent there.")
    advertise: str = setting("", "The URL that routers send requests to; default: that of engine.")
    events: str = setting("", "Where the engine publishes its KV events, tcp://HOST:PORT; default: what it has itself is not told.")
    events_replay: str = setting("", "Where it replays them, tcp://HOST:PORT; default: nowhere, so that a gap makes all void.")
    master: str = setting("127.0.0.1:7440", "Addresses of the masters, HOST:PORT, comma separated.", variable=MASTER)
    http: str = setting(HTTP_DEFAULT, HTTP_HELP)
    http_token_file: str = setting("", HTTP_TOKEN_FILE_HELP)
    http_tls_cert: str = setting("", CERT_HELP)
    http_tls_key: str = setting("", KEY_HELP)
    log_level: str = setting("info", LEVEL_HELP, choices=LEVELS)
    log_format: str = setting("text", FORMAT_HELP, choices=FORMATS)
    tenant: str = setting("", "The tenant whose prompts the engine serves, as the router has it.")
    token: str = setting("", "The tenant's token.")
    instance_token: str = setting(
        "", "Token of the section [instances], by which the engine reports to the scheduler; default: the tenant's."
    )
    name: str = setting("", "Name of the instance, unlike all others'; default: the engine's address.")
    role: str = setting("both", "What the engine does for a request: prefill, decode, or both.", choices=ROLES)
    node: str = setting("", "Name of the storage node that its blocks are put to; default: it has none but its own.")
    namespace_id: str = setting(
        "",
        "Id of the blocks' namespace, in hex, as vLLM's connector logs it, with the router's naming vllm; default: named by model.",
    )
    model: str = setting("", "Without namespace_id: the model of the blocks' namespace, as the router's.")
    dtype: str = setting("bfloat16", "Without namespace_id: the element type of the blocks' namespace, as the router's.")
    block_tokens: int = setting(16, "Tokens in a block of the engine.", minimum=1, maximum=65_536)
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
