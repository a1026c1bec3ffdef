"""A TOML file of an operator, read whole."""

import tomllib
from pathlib import Path
from typing import Any

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import format_size


def read_toml(path: str, what: str, *, max_bytes: int) -> dict[str, Any]:
    """What is in the file, which is called `what` to whoever wrote it. Raises ConfigError."""
    try:
        data = Path(path).read_bytes()
        if len(data) > max_bytes:
            raise ConfigError(f"{what} {path} has more than {format_size(max_bytes)}")
        return tomllib.loads(data.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what} {path}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:  # TOMLDecodeError is one, and so is what a number of 5,000 digits gives
        raise ConfigError(f"{what} {path} is not TOML: {error}") from None
