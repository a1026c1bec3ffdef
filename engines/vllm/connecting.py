"""From the plug-ins' settings to a client."""

from typing import Final

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.security.tls.config import tls_of

CONNECT_TIMEOUT_S: Final = 0.5
"""A master that does not answer for so long is not connected to now: the engine computes instead."""


def connect(settings: VllmSettings) -> Client:
    """Asks nobody yet. Each role and rank of an engine has one of its own: they may be processes of their own."""
    return Client(
        settings.master,
        tenant=settings.tenant,
        token=settings.token,
        settings=ClientSettings(connect_timeout_s=CONNECT_TIMEOUT_S, **tls_of(settings)),
    )
