"""torch for the codecs, which are imported only where tensors are encoded: missing, it is one ConfigError and not an ImportError."""

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.extras import install_line

try:
    import torch
except ImportError as missing:
    raise ConfigError(f"tensors are encoded and decoded with torch: {install_line('hbm')}") from missing

__all__ = ["torch"]
