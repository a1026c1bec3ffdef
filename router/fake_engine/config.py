"""The settings of stand-in engines."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol import shared_settings
from kvstore.protocol.settings import setting
from kvstore.security.tls.config import TlsSettings

SECTION: Final = "standin"
PREFILL: Final = "prefill"
DECODE: Final = "decode"


@dataclass(frozen=True, slots=True)
class FakeEngineSettings(TlsSettings):
    """Flags of `python -m kvstore.router.fake_engine.engine`, `KVSTORE_STANDIN_*`, or [standin] in the TOML file."""

    role: str = setting(PREFILL, "What the engine does: prefill or decode.", choices=(PREFILL, DECODE))
    listen: str = setting("127.0.0.1:0", "HOST:PORT for requests (HTTP).")
    master: str = shared_settings.MASTER()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    instance_token: str = shared_settings.INSTANCE_TOKEN()
    node: str = setting("", "Name of the storage node that blocks are put to. A prefill engine without one never has a prefix.")
    name: str = setting("", "Name of the instance; default: the role and the address listened on.")
    model: str = setting("llama3-8b", "Model whose times are kept, and of the blocks' namespace.")
    gpu: str = setting("A100-80G", "GPU whose times are kept.")
    speedup: float = setting(1.0, "The engine's time passes this many times faster. What it reports is in its own time.", minimum=0.001)
    block_tokens: int = shared_settings.BLOCK_TOKENS()
