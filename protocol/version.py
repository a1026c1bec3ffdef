"""Which kvstore this is, as daemons tell one another. pyproject.toml takes it from here: to ask the installed distribution costs each
daemon a twentieth of its start."""

from typing import Final

VERSION: Final = "0.1.0"
