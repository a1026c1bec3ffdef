"""torch for the codecs, which are imported only where tensors are encoded: missing, it is one ConfigError and not an ImportError."""

from kvstore.protocol.errors import ConfigError

try:
    import torch
except ImportError as missing:
    raise ConfigError("tensors are encoded and decoded with torch: pip install 'kvstore[hbm]'") from missing

__all__ = ["torch"]
