"""The router's optional parts: one clear error where one is not installed. Imports none of them."""

from importlib.util import find_spec

from kvstore.protocol.errors import ConfigError


def need(package: str, install: str) -> None:
    """Raises ConfigError naming `pip install INSTALL` unless `package` can be imported."""
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed, and this needs it: pip install '{install}'")
