"""Severities of banners and events, one for the whole console. The page gives each one colour."""

from typing import Final

INFO: Final = "info"
WARNING: Final = "warning"
"""Degraded: all requests are still served."""
ERROR: Final = "error"
"""Data or service is lost until an operator acts."""
