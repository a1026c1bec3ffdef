"""The router's optional parts: one clear error where one is not installed. Imports none of them."""

from importlib.util import find_spec

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.extras import install_line


def need(package: str, extra: str) -> None:
    """Raises ConfigError saying how to install `extra` unless `package` can be imported."""
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed, and this needs it: {install_line(extra)}")
