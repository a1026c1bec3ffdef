"""Settings of kvstore-router; docs/router.md describes their effects."""

from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.key_names import KVSTORE, NAMINGS
from kvstore.protocol import shared_settings
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size, constant, setting
from kvstore.rpc.address import parse_address
from kvstore.security.listen_address import check_listen_address
from kvstore.security.tls.config import TlsSettings

SECTION: Final = "router"


@dataclass(frozen=True, slots=True)
class RouterSettings(TlsSettings):
    """Settings of kvstore-router; docs/settings.md is generated from this class."""

    listen: str = setting("127.0.0.1:8000", "HOST:PORT for clients (HTTP).")
    allow_unauthenticated: bool = setting(
        False,
        "Listen on an address that is not loopback. The router does not authenticate clients: prefer a proxy that does.",
    )
    http: str = shared_settings.HTTP()
    http_token_file: str = shared_settings.HTTP_TOKEN_FILE()
    http_tls_cert: str = shared_settings.HTTP_TLS_CERT()
    http_tls_key: str = shared_settings.HTTP_TLS_KEY()
    log_level: str = shared_settings.LOG_LEVEL()
    log_format: str = shared_settings.LOG_FORMAT()
    master: str = shared_settings.MASTER()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    model: str = shared_settings.MODEL()
    dtype: str = shared_settings.DTYPE()
    block_tokens: int = shared_settings.BLOCK_TOKENS()
    naming: str = setting(KVSTORE, "Scheme of the engines' block keys: kvstore, or vllm for kvstore's connector in vLLM.", choices=NAMINGS)
    namespace_id: str = shared_settings.NAMESPACE_ID()
    ttft_slo_s: float = setting(0.0, "SLO of the time to first token, for requests without their own; 0: none.", minimum=0)
    tbt_slo_s: float = setting(0.0, "SLO of the time between tokens, for requests without their own; 0: none.", minimum=0)
    retention_from_requests: bool = shared_settings.RETENTION_FROM_REQUESTS()
    retention_ceiling: int = shared_settings.RETENTION_CEILING()
    max_body_bytes: Size = setting(Size(8 << 20), "Larger requests are refused.", minimum=1024, maximum=1 << 30)
    max_requests: int = setting(1024, "Most concurrent requests; further ones are refused.", minimum=1)
    schedule_timeout_s: float = setting(2.0, "Time for the master's scheduler to place a request.", minimum=0.01)
    first_token_timeout_s: float = setting(
        120.0, "Time for a prefill, or the start of a streamed response, its queue included.", minimum=0.01
    )
    answer_timeout_s: float = setting(600.0, "Time for a response that is not streamed.", minimum=0.01)
    drain_s: float = setting(10.0, "Time for running requests to end after SIGTERM.", minimum=0)
    next_token_timeout_s: float = setting(30.0, "Time between two parts of a streamed response.", minimum=0.01)

    attempts: int = constant(6)
    """Attempts to schedule a request whose engines fail before its first token. The pauses, 0.2 s doubling, sum to 6 s."""
    tokenize_timeout_s: float = constant(5.0)
    """Time for an engine to tokenise a prompt; after it the request is routed by load."""
    retry_pause_s: float = constant(0.2)
    """Pause before the second attempt; it doubles with each attempt."""
    connect_timeout_s: float = constant(1.0)
    """Time for a connection to an engine, including name resolution."""
    client_timeout_s: float = constant(30.0)
    """A client that sends or reads nothing for this long is disconnected."""


def check_settings(settings: RouterSettings) -> None:
    """Raise ConfigError if no model is set, or the listen address is not loopback and not explicitly allowed."""
    if not settings.model:
        raise ConfigError("model is not set: give --model NAME, the name in the engines' namespace")
    address = parse_address(settings.listen)
    check_listen_address(
        "listen",
        address.host,
        is_authenticated=False,
        allow_unauthenticated=settings.allow_unauthenticated or bool(address.unix),
        mend="listen on loopback, behind a proxy that authenticates clients",
    )
