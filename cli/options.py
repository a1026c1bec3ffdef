"""Options that the commands share (cluster, tenant, credentials), and output of results as text or JSON."""

import dataclasses
import functools
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import IO, Any, Final, TypeVar, cast

import click
from rich.console import Console, RenderableType

from kvstore.client.config import SECTION, ClientSettings
from kvstore.protocol.settings import flag_name, given_settings, load_settings, only_value

F = TypeVar("F", bound=Callable[..., Any])

NAMES: Final = ("master", "tenant", "token", "deadline_s")
"""Settings with a flag; the others are read from KVSTORE_CLIENT_* and the file only."""

NAMES_MASTER: Final = "kvstore.names_master"
CONFIG_FILE: Final = "kvstore.config_file"

_PADDING: Final = re.compile(r" +(?=\n)")
PIPED_COLUMNS: Final = 10_000
"""Wider than any table, so that output to a pipe is never wrapped."""

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def client_options(function: F) -> F:
    """Add --master, --tenant, --token, --deadline-s and --config; the command receives `settings`, a ClientSettings."""

    @functools.wraps(function)
    def command(*args: Any, config: str | None, **options: Any) -> Any:
        flags = {name: options.pop(name) for name in NAMES}
        given = given_settings(ClientSettings, SECTION, flags=flags, config=config)
        click.get_current_context().meta.update({NAMES_MASTER: "master" in given, CONFIG_FILE: config})
        return function(*args, settings=load_settings(ClientSettings, SECTION, flags=flags, config=config), **options)

    decorated: Any = click.option("--config", metavar="FILE", help="TOML file with settings.")(command)
    by_name = {field.name: field for field in dataclasses.fields(ClientSettings)}
    for name in reversed(NAMES):
        field = by_name[name]
        text = field.metadata["help"] + (f"  [default: {field.default}]" if field.default else "")
        metavar = "SECONDS" if name.endswith("_s") else "TEXT"
        decorated = click.option(flag_name(name), name, multiple=True, callback=only_value, metavar=metavar, help=text)(decorated)
    return decorated  # type: ignore[no-any-return]


def names_master() -> bool:
    """Return whether a flag, a variable or the file sets the master for the current command, even to the default address."""
    return bool(click.get_current_context().meta[NAMES_MASTER])


def config_file() -> str | None:
    """Return the --config of the current command."""
    named: str | None = click.get_current_context().meta[CONFIG_FILE]
    return named


def console() -> Console:
    """Return a rich console on standard output, as wide as the terminal or COLUMNS; pipes and files are not wrapped.

    Markup is off: names and IPv6 addresses may contain brackets and colons that rich would interpret.
    """
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console(markup=False, emoji=False)
    return Console(markup=False, emoji=False, width=PIPED_COLUMNS, file=cast(IO[str], UnpaddedOutput()))


class UnpaddedOutput(io.TextIOBase):
    """Standard output that drops the trailing blanks of table rows, which would wrap in a pager."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of standard output."""
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        sys.stdout.write(_PADDING.sub("", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def show(value: Any, view: Callable[[], RenderableType], *, as_json: bool) -> None:
    """Print a result: `value` as JSON, or the rendered view."""
    if as_json:
        echo_json(value)
    else:
        console().print(view())


def show_each(values: Iterable[Any], view: Callable[[], RenderableType], *, as_json: bool) -> None:
    """As `show`, with one JSON object per line."""
    if as_json:
        for value in values:
            echo_json(value)
    else:
        console().print(view())


def echo_json(value: Any) -> None:
    """Print the value as one line of JSON."""
    click.echo(json.dumps(value))
