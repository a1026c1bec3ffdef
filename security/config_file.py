"""Operators' TOML files: reading, and detection of changes."""

import os
import tomllib
from pathlib import Path
from typing import Any

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import format_size


def signature(path: str) -> tuple[int, ...]:
    """Return a value that differs after the file was written or replaced; () for a missing one."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_toml(path: str, what: str, *, max_bytes: int) -> dict[str, Any]:
    """Return the content of the file, `what` in errors. Raises ConfigError."""
    try:
        data = Path(path).read_bytes()
        if len(data) > max_bytes:
            raise ConfigError(f"{what} {path} has more than {format_size(max_bytes)}")
        return tomllib.loads(data.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what} {path}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:  # TOMLDecodeError is one, and so is what a number of 5,000 digits gives
        raise ConfigError(f"{what} {path} is not TOML: {error}") from None
