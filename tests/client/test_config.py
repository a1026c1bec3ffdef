"""The settings of a client."""

from kvstore.client.config import SECTION, ClientSettings
from kvstore.protocol.settings import load_settings


def test_defaults_and_environment() -> None:
    settings = load_settings(ClientSettings, SECTION, flags={}, environ={"KVSTORE_CLIENT_PUT_INLINE_BYTES": "8KiB"})
    assert (settings.put_inline_bytes, settings.master) == (8192, "127.0.0.1:7440")
