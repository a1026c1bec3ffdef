"""Tokens files of tests: tenants, a join token for nodes of any name, an engine's, an operator's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

JOIN: Final = "a node's join token"
ENGINE: Final = "an engine's token"
OPERATOR: Final = "an operator's token"


def tokens_text(tenants: Mapping[str, str], more: str = "") -> str:
    """Return a tokens file as text; `more` is appended TOML."""
    lines = ["[tenants]", *(f'{tenant} = "{token}"' for tenant, token in tenants.items())]
    return "\n".join(
        (*lines, "[instances]", f'"*" = "{ENGINE}"', "[admins]", f'operator = "{OPERATOR}"', "[nodes]", f'"*" = "{JOIN}"', more)
    )


def tokens_file(folder: Path, tenants: Mapping[str, str] | None = None, more: str = "") -> str:
    """Write a tokens file to `folder` and return its path. Default: tenant `red` with token `secret`."""
    path = folder / "tokens.toml"
    path.write_text(tokens_text(tenants or {"red": "secret"}, more))
    return str(path)
