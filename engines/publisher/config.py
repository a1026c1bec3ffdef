"""Settings of kvstore-publisher; docs/other-routers.md explains them."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol import shared_settings
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import setting
from kvstore.security.tls.config import TlsSettings

SECTION: Final = "publisher"
VLLM: Final = "vllm"
DYNAMO: Final = "dynamo"
LLM_D: Final = "llm-d"
FORMS: Final = (VLLM, DYNAMO, LLM_D)
"""Forms of events: see form.py, which imports an optional library."""


@dataclass(frozen=True, slots=True)
class PublisherSettings(TlsSettings):
    """Settings of the daemon. docs/settings.md is generated from this class."""

    master: str = shared_settings.MASTER()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    events: str = setting("tcp://127.0.0.1:5557", "ZeroMQ address that events are published at, tcp://HOST:PORT.")
    events_replay: str = setting("tcp://127.0.0.1:5558", "ZeroMQ address that replays missed events; empty: no replay.")
    topic: str = setting(
        "", "ZeroMQ topic of each message, for subscribers' filters; default: none, with form llm-d kv@pool:kvstore@MODEL."
    )
    form: str = setting(VLLM, "Reader of the events: vllm (the form of vLLM's own events), dynamo or llm-d.", choices=FORMS)
    model: str = shared_settings.MODEL()
    namespace_id: str = shared_settings.NAMESPACE_ID()
    dtype: str = shared_settings.DTYPE()
    block_tokens: int = shared_settings.BLOCK_TOKENS(default=16)
    http: str = shared_settings.HTTP()
    http_token_file: str = shared_settings.HTTP_TOKEN_FILE()
    http_tls_cert: str = shared_settings.HTTP_TLS_CERT()
    http_tls_key: str = shared_settings.HTTP_TLS_KEY()
    log_level: str = shared_settings.LOG_LEVEL()
    log_format: str = shared_settings.LOG_FORMAT()


def check_settings(settings: PublisherSettings) -> None:
    """Check combinations of settings. Raises ConfigError."""
    if settings.form in (DYNAMO, LLM_D) and not settings.model:
        raise ConfigError(f"form {settings.form} needs a model: set --model to the model of the store's blocks")


def topic_of(settings: PublisherSettings) -> str:
    """Return the topic. llm-d takes the owner of blocks from it: here a pool that all engines reach."""
    return settings.topic or (f"kv@pool:kvstore@{settings.model}" if settings.form == LLM_D else "")
