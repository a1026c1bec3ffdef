"""From settings to a client."""

from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client


def connect(settings: ClientSettings) -> Client:
    """A client of the cluster that the settings name; a context manager."""
    return Client(settings.master, tenant=settings.tenant, token=settings.token, deadline_s=settings.deadline_s, settings=settings)
