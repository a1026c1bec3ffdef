"""From the plug-ins' settings to a client."""

from typing import Final

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.engines.reachability import ReachabilityCheck
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.trouble import LOG
from kvstore.security.tls.config import tls_of

CONNECT_TIMEOUT_S: Final = 0.5
"""A master that does not answer for so long is not connected to now: the engine computes instead."""


def connect(settings: VllmSettings) -> Client:
    """Asks nobody yet. Each role and rank of an engine has one of its own: they may be processes of their own."""
    chosen = ClientSettings(
        master=settings.master,
        tenant=settings.tenant,
        token=settings.token,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        is_loaded=True,
        **tls_of(settings),
    )
    return Client(settings=chosen)


def check_reachability(client: Client, settings: VllmSettings) -> ReachabilityCheck:
    """Log in vLLM's log whether the store answers, within 5 s and at each change. One of an engine is enough: its scheduler's."""
    return ReachabilityCheck(lambda deadline_s: client.ping(deadline_s=deadline_s), settings.master, LOG)
