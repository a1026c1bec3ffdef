"""The settings of kvstore-publisher. What they do is in docs/other-routers.md."""

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
"""Of events: see form.py, which needs an optional library."""


@dataclass(frozen=True, slots=True)
class PublisherSettings(TlsSettings):
    """See docs/settings.md, which is made from this."""

    master: str = shared_settings.MASTER()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    events: str = setting("tcp://127.0.0.1:5557", "Where events are published, as ZeroMQ has it: tcp://HOST:PORT.")
    events_replay: str = setting("tcp://127.0.0.1:5558", "Where missed events are asked for; empty: nowhere.")
    topic: str = setting(
        "", "First part of each message, by which subscribers choose; default: none, with form llm-d kv@pool:kvstore@MODEL."
    )
    form: str = setting(VLLM, "Who reads the events: vllm (as vLLM publishes its own), dynamo or llm-d.", choices=FORMS)
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
    """Raises ConfigError for what no single setting can be blamed for alone."""
    if settings.form in (DYNAMO, LLM_D) and not settings.model:
        raise ConfigError(f"form {settings.form} without model: name the model that the store's blocks are of")


def topic_of(settings: PublisherSettings) -> str:
    """llm-d reads whose blocks they are from the topic: those of a pool, which all its engines reach."""
    return settings.topic or (f"kv@pool:kvstore@{settings.model}" if settings.form == LLM_D else "")
