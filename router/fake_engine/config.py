"""Settings of fake engines."""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol import shared_settings
from kvstore.protocol.settings import setting
from kvstore.security.tls.config import TlsSettings

SECTION: Final = "fake_engine"
PREFILL: Final = "prefill"
DECODE: Final = "decode"


@dataclass(frozen=True, slots=True)
class FakeEngineSettings(TlsSettings):
    """Flags of `python -m kvstore.router.fake_engine.engine`, `KVSTORE_FAKE_ENGINE_*`, or [fake_engine] in the TOML file."""

    role: str = setting(PREFILL, "Role of the engine: prefill or decode.", choices=(PREFILL, DECODE))
    listen: str = setting("127.0.0.1:0", "HOST:PORT for requests (HTTP).")
    master: str = shared_settings.MASTER()
    tenant: str = shared_settings.TENANT()
    token: str = shared_settings.TOKEN()
    instance_token: str = shared_settings.INSTANCE_TOKEN()
    node: str = setting("", "Name of the storage node that blocks are put to. A prefill engine without one never has a cached prefix.")
    name: str = setting("", "Name of the instance; default: the role and the listen address.")
    model: str = setting("llama3-8b", "Simulated model, also that of the blocks' namespace.")
    gpu: str = setting("A100-80G", "Simulated GPU.")
    speedup: float = setting(1.0, "Factor by which the engine's time passes faster. Reports are in the engine's time.", minimum=0.001)
    block_tokens: int = shared_settings.BLOCK_TOKENS()
