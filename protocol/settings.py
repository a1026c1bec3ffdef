"""Settings of every program: one dataclass a program, filled from flags, environment and one TOML file, in order of
precedence.

A field made with `setting` gives the flag (--drain-s), the variable (KVSTORE_NODE_DRAIN_S), the key in the file's
section ([node] drain_s = 10.0) and the row in docs/settings.md. A shared setting also has a variable (KVSTORE_TLS_CA)
and a key ([shared] tls_ca) for all programs; the program's own takes precedence.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.variables import (
    CONFIG,
    SECTIONS,
    SHARED,
    SHARED_SECTION,
    check_variables,
    nearest,
    shared_variable_name,
    variable_name,
)

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])

_UNITS: Final = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("i", 1024), ("", 1024))
}
_SIZE: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*")
_MARK: Final = "is_loaded_mark"
NOT_REPEATED: Final = ("master", "nvme", "hbm")
"""Settings of which users have several: of `--nvme A --nvme B` the last value alone would leave a disk unused."""
_NOUNS: Final = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class Size(int):
    """A number of bytes; written `4KiB`, `1.5GiB`, `10GB` or a plain number."""


def parse_size(text: str) -> Size:
    """Raises ConfigError unless `text` is a number of bytes with an optional unit (KiB, MiB, GiB, TiB: 1024; KB, MB,
    GB, TB: 1000).
    """
    match = _SIZE.fullmatch(text)
    unit = match and next((scale for name, scale in _UNITS.items() if name.lower() == match[2].lower()), None)
    if not match or unit is None:
        raise ConfigError(f"{text!r} is not a size: write a number of bytes with an optional unit, such as 4KiB, 64MiB or 1.5GiB")
    return Size(float(match[1]) * unit) if "." in match[1] else Size(int(match[1]) * unit)


def format_size(size_bytes: int) -> str:
    """Return the size for people, with at most one decimal: `4.5 KiB`, `64 MiB`."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    shared: bool = False,
) -> Any:
    """Declare a field of a settings dataclass. `help` is one line; numbers must be in [minimum, maximum].

    `shared`: several programs have the setting. It is declared once, as a `partial` of this function, and listed in
    `SHARED`.
    """
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": tuple(choices), "shared": shared}
    return dataclasses.field(default=default, metadata=metadata)


def loaded_mark() -> Any:
    """Declare a field that is no setting: True in settings made by `load_settings`, which has read all sources."""
    return dataclasses.field(default=False, repr=False, compare=False, metadata={_MARK: True})


def constant(default: Any) -> Any:
    """Declare a field that no flag, variable or file sets.

    For a value that is equal in every cluster but that tests change. Without such tests, use a module constant; for a
    value that operators choose, a `setting`.
    """
    return dataclasses.field(default=default)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def load_settings(
    kind: type[S],
    section: str,
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
    flag_name: Callable[[str], str] = flag_name,
) -> S:
    """Fill `kind` from flags (None: not given), then variables, then the TOML file, then defaults.

    The program's own variable (KVSTORE_<SECTION>_<NAME>) and section take precedence over the shared ones. The file is
    `config`, else that of KVSTORE_CONFIG, else none. `flag_name` maps a setting's name to its flag, for errors. Raises
    ConfigError with the setting, or the unknown section of the file, and its source.
    """
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = given_settings(kind, section, flags=flags, environ=environ, config=config, flag_name=flag_name)
    marks = {name: True for name, field in fields.items() if _MARK in field.metadata}
    return kind(**marks, **{name: _parse(hints[name], raw, fields[name].metadata, source) for name, (source, raw) in given.items()})


def given_settings(
    kind: type[Any],
    section: str,
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
    flag_name: Callable[[str], str] = flag_name,
) -> dict[str, tuple[str, Any]]:
    """Return the settings that any source gives, each with its source of highest precedence and the raw value there.

    A setting given with its default value is included. Raises ConfigError: the file cannot be read, or a variable is
    misspelt.
    """
    environ = os.environ if environ is None else environ
    check_variables(environ, section, [field.name for field in settings_of(kind)])
    document = _read_file(config or environ.get(CONFIG), section)
    own = _section(config or environ.get(CONFIG), document, section, {field.name for field in settings_of(kind)})
    shared = _section(config or environ.get(CONFIG), document, SHARED_SECTION, SHARED)
    given: dict[str, tuple[str, Any]] = {}
    for field in settings_of(kind):
        variables, tables = [variable_name(section, field.name)], [(section, own)]
        if field.metadata["shared"]:
            variables.append(shared_variable_name(field.name))
            tables.append((SHARED_SECTION, shared))
        sources = [(flag_name(field.name), flags.get(field.name))]
        sources += [(variable, environ.get(variable)) for variable in variables]
        sources += [(f"[{name}] {field.name}", table.get(field.name)) for name, table in tables]
        if source := next((source for source in sources if source[1] is not None), None):
            given[field.name] = source
    return given


def is_setting(field: "dataclasses.Field[Any]") -> bool:
    """Return True if a field is made by `setting`. Only code and tests set other fields of such a class."""
    return "help" in field.metadata


def settings_of(kind: type[Any]) -> "list[dataclasses.Field[Any]]":
    """Return all settings, its own before the inherited ones."""
    own = vars(kind).get("__annotations__", {})
    return sorted(filter(is_setting, dataclasses.fields(kind)), key=lambda field: field.name not in own)


def options(kind: type[Any]) -> Callable[[F], F]:
    """Click decorator: one option a setting, None when not given, so that other sources can fill it; and --config FILE.

    Of an option that is given twice the last value counts, except for NOT_REPEATED.
    """

    import click

    def decorate(function: F) -> F:
        hints = get_type_hints(kind)
        for field in reversed(settings_of(kind)):
            default = show_default(field.default)
            text = field.metadata["help"] + (f"  [default: {default}]" if default else "")
            name = flag_name(field.name)
            if hints[field.name] is bool:
                function = click.option(f"{name}/--no-{name[2:]}", field.name, default=None, help=text)(function)
            else:
                once = {"multiple": True, "callback": only_value} if field.name in NOT_REPEATED else {"default": None}
                function = click.option(name, field.name, metavar=_metavar(hints[field.name]), help=text, **once)(function)
        return click.option("--config", default=None, metavar="FILE", help="TOML file with settings.")(function)

    return decorate


def only_value(context: Any, parameter: Any, values: Sequence[str]) -> str | None:
    """Callback of a click option with `multiple=True`: its value, None if it is not given. Raises BadParameter for different values."""
    import click

    if len(set(values)) > 1:
        hint = ", with commas between the addresses" if "comma separated" in parameter.help else ""
        raise click.BadParameter(f"given {len(values)} times: give it once{hint}")
    return values[0] if values else None


def show_default(default: Any) -> str:
    """Return a setting's default as users write it."""
    return format_size(default) if isinstance(default, Size) else str(default)


def _metavar(hint: Any) -> str:
    return {Size: "SIZE", int: "N", float: "X"}.get(hint, "TEXT")


def _read_file(path: str | None, section: str) -> dict[str, Any]:
    if not path:
        return {}
    import tomllib

    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {path}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:  # TOMLDecodeError is one, and so is what a number of 5,000 digits gives
        raise ConfigError(f"{path} is not TOML: {error}") from None
    _check_sections(path, document, SECTIONS | {section, SHARED_SECTION})
    return document


def _section(path: str | None, document: Mapping[str, Any], section: str, known: Collection[str]) -> dict[str, Any]:
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {section} is not a section; write [{section}] and its settings below")
    if unknown := sorted(set(table) - set(known)):
        raise ConfigError(f"{path}, section [{section}]: unknown setting {', '.join(unknown)}; {_hint(unknown, known)}")
    return table


def _check_sections(path: str, document: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ConfigError for an unknown section. All programs share the file, so a missing section is no error."""
    for name, content in document.items():
        if name in known:
            continue
        if not isinstance(content, dict | list):
            raise ConfigError(f"{path}: {name} is outside of any section: move it below the line [SECTION] of its program")
        meant = nearest(name, known)
        mend = f"did you mean [{meant}]?" if meant else f"there are {', '.join(f'[{one}]' for one in sorted(known))}"
        raise ConfigError(f"{path}: unknown section [{name}]: {mend}")


def _hint(unknown: Collection[str], known: Collection[str]) -> str:
    """Return the probably intended names, else all known ones: masters have 70 settings."""
    meant = [nearest(name, known) for name in unknown]
    return f"did you mean {', '.join(meant)}?" if all(meant) else f"known are {', '.join(sorted(known))}"


def _parse(hint: Any, raw: Any, metadata: Mapping[str, Any], source: str) -> Any:
    try:
        value = _convert(hint, raw)
    except (ValueError, TypeError, ConfigError) as error:
        detail = error if isinstance(error, ConfigError) else f"{raw!r} is not {_NOUNS[hint]}"
        raise ConfigError(f"{source}: {detail}") from None
    low, high, choices = metadata["minimum"], metadata["maximum"], metadata["choices"]
    if low is not None and value < low:
        raise ConfigError(f"{source}: {raw} is below the minimum of {show_default(type(value)(low))}")
    if high is not None and value > high:
        raise ConfigError(f"{source}: {raw} is above the maximum of {show_default(type(value)(high))}")
    if choices and value not in choices:
        raise ConfigError(f"{source}: {raw!r} is not one of {', '.join(choices)}")
    return value


def _convert(hint: Any, raw: Any) -> Any:
    if hint is Size:
        return parse_size(raw if isinstance(raw, str) else str(raw))
    if hint is bool:
        word = str(raw).lower()
        if word not in ("1", "0", "true", "false", "yes", "no", "on", "off"):
            raise ValueError(raw)
        return word in ("1", "true", "yes", "on")
    accepted = {str: (str,), int: (str, int), float: (str, int, float)}[hint]
    if not isinstance(raw, accepted) or isinstance(raw, bool):
        raise TypeError(raw)
    value = hint(raw)
    if hint is float and not math.isfinite(value):
        raise ValueError(raw)
    return value
