"""The settings of kvstore-publisher. What they do is in docs/other-routers.md."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import setting
from kvstore.protocol.variables import MASTER
from kvstore.security.tls.config import TlsSettings
from kvstore.security.tls.https import CERT_HELP, KEY_HELP
from kvstore.telemetry.http.server import HTTP_DEFAULT, HTTP_HELP, HTTP_TOKEN_FILE_HELP
from kvstore.telemetry.logs import FORMAT_HELP, FORMATS, LEVEL_HELP, LEVELS

SECTION: Final = "publisher"
VLLM: Final = "vllm"
DYNAMO: Final = "dynamo"
LLM_D: Final = "llm-d"
FORMS: Final = (VLLM, DYNAMO, LLM_D)
"""Of events: see form.py, which needs an optional library."""


@dataclass(frozen=True, slots=True)
class PublisherSettings(TlsSettings):
    """See docs/settings.md, which is made from this."""

    master: str = setting("127.0.0.1:7440", "Addresses of the masters, HOST:PORT, comma separated.", variable=MASTER)
    tenant: str = setting("", "The tenant whose blocks are told of.")
    token: str = setting("", "The tenant's token.")
    events: str = setting("tcp://127.0.0.1:5557", "Where events are published, as ZeroMQ has it: tcp://HOST:PORT.")
    events_replay: str = setting("tcp://127.0.0.1:5558", "Where missed events are asked for; empty: nowhere.")
    topic: str = setting(
        "", "First part of each message, by which subscribers choose; default: none, with form llm-d kv@pool:kvstore@MODEL."
    )
    form: str = setting(VLLM, "Who reads the events: vllm (as vLLM publishes its own), dynamo or llm-d.", choices=FORMS)
    model: str = setting("", "The model of the store's blocks, by the name under which routers ask for it; default: they are told of none.")
    namespace_id: str = setting(
        "", "Id of the blocks' namespace, in hex, as vLLM's connector logs it; default: blocks are named by the model."
    )
    dtype: str = setting("bfloat16", "Without namespace_id: the element type of the blocks' namespace, as the router's.")
    block_tokens: int = setting(16, "Tokens in a block of the model.", minimum=1, maximum=65_536)
    http: str = setting(HTTP_DEFAULT, HTTP_HELP)
    http_token_file: str = setting("", HTTP_TOKEN_FILE_HELP)
    http_tls_cert: str = setting("", CERT_HELP)
    http_tls_key: str = setting("", KEY_HELP)
    log_level: str = setting("info", LEVEL_HELP, choices=LEVELS)
    log_format: str = setting("text", FORMAT_HELP, choices=FORMATS)


def check_settings(settings: PublisherSettings) -> None:
    """Raises ConfigError for what no single setting can be blamed for alone."""
    if settings.form in (DYNAMO, LLM_D) and not settings.model:
        raise ConfigError(f"form {settings.form} without model: name the model that the store's blocks are of")


def topic_of(settings: PublisherSettings) -> str:
    """llm-d reads whose blocks they are from the topic: those of a pool, which all its engines reach."""
    return settings.topic or (f"kv@pool:kvstore@{settings.model}" if settings.form == LLM_D else "")
