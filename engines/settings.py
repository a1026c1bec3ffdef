"""What every plug-in does with the settings that its engine hands over: a mapping out of a JSON text or a file of the engine's own."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import load_settings

S = TypeVar("S")


def settings_from(
    kind: type[S],
    section: str,
    given: Mapping[str, Any],
    *,
    source: str,
    engine_names: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> S:
    """`kind` filled from `given`, else KVSTORE_<SECTION>_<NAME>, the TOML file and defaults; see `load_settings`.

    Args:
        source: what the engine calls the mapping, for the error.
        engine_names: entries of the mapping that are the engine's own.

    Raises:
        ConfigError: an unknown name, or a value outside its range.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(known) - set(engine_names)):
        raise ConfigError(f"{source}: unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return load_settings(kind, section, flags={name: given[name] for name in known if name in given}, environ=environ)
