"""The settings of kvstore-router. What they do is in docs/router.md."""

from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.naming import KVSTORE, NAMINGS
from kvstore.protocol import shared_settings
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size, constant, setting
from kvstore.rpc.address import parse_address
from kvstore.security.listen_address import check_listen_address
from kvstore.security.tls.config import TlsSettings

SECTION: Final = "router"


@dataclass(frozen=True, slots=True)
class RouterSettings(TlsSettings):
    """See docs/settings.md, which is made from this."""

    listen: str = setting("127.0.0.1:8000", "HOST:PORT for clients (HTTP).")
    allow_unauthenticated: bool = setting(
        False,
        "Listen also where other hosts reach this. The router asks nobody who he is: rather put a proxy that does before it.",
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
    naming: str = setting(
        KVSTORE, "How the engines call their blocks: kvstore, or vllm, where kvstore's connector in vLLM stores them.", choices=NAMINGS
    )
    namespace_id: str = shared_settings.NAMESPACE_ID()
    ttft_slo_s: float = setting(0.0, "Promised time to the first token, unless a request names its own; 0: none.", minimum=0)
    tbt_slo_s: float = setting(0.0, "Promised time between tokens, likewise.", minimum=0)
    max_body_bytes: Size = setting(Size(8 << 20), "Larger requests are refused.", minimum=1024, maximum=1 << 30)
    max_requests: int = setting(1024, "Requests served at once; those beyond are refused.", minimum=1)
    schedule_timeout_s: float = setting(2.0, "Time for the master to say where a request goes.", minimum=0.01)
    first_token_timeout_s: float = setting(
        120.0, "Time for a prefill, or the start of a streamed answer, its queue included.", minimum=0.01
    )
    answer_timeout_s: float = setting(600.0, "Time for an answer that is not streamed.", minimum=0.01)
    drain_s: float = setting(10.0, "Time that running requests have to end after SIGTERM.", minimum=0)
    next_token_timeout_s: float = setting(30.0, "Time between two parts of a streamed answer.", minimum=0.01)

    attempts: int = constant(6)
    """How often a request is scheduled when engines fail before its first token: pauses of 0.2 s that double come to 6 s."""
    tokenize_timeout_s: float = constant(5.0)
    """Time for an engine to tokenise a prompt; later the request goes by load."""
    retry_pause_s: float = constant(0.2)
    """Pause before the second attempt; it doubles from one to the next."""
    connect_timeout_s: float = constant(1.0)
    """Time for a connection to an engine, the look-up of its name included."""
    client_timeout_s: float = constant(30.0)
    """A client that sends or takes nothing for this long is hung up on."""


def check_settings(settings: RouterSettings) -> None:
    """Raises ConfigError: no model is named, or the address to listen at needs authentication."""
    if not settings.model:
        raise ConfigError("no model is named: give --model NAME, as the engines' blocks have it")
    address = parse_address(settings.listen)
    check_listen_address(
        "listen",
        address.host,
        is_authenticated=False,
        allow_unauthenticated=settings.allow_unauthenticated or bool(address.unix),
        mend="have it listen on the loopback, behind a proxy that asks",
    )
