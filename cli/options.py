"""What the commands share: the options that say which cluster and as whom, and how results are printed."""

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
from kvstore.protocol.settings import flag_name, given_settings, load_settings

F = TypeVar("F", bound=Callable[..., Any])

NAMES: Final = ("master", "tenant", "token", "deadline_s")
"""Settings that have a flag; the others come from KVSTORE_CLIENT_* and the file only."""

NAMES_MASTER: Final = "kvstore.names_master"
CONFIG_FILE: Final = "kvstore.config_file"

_FILLING: Final = re.compile(r" +(?=\n)")
PIPED_COLUMNS: Final = 10_000
"""Wider than any table: a pipe has no edge at which words would have to be cut."""

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def client_options(function: F) -> F:
    """Adds --master, --tenant, --token, --deadline-s and --config; the command gets `settings`, a ClientSettings."""

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
        decorated = click.option(flag_name(name), name, metavar=metavar, help=text)(decorated)
    return decorated  # type: ignore[no-any-return]


def names_master() -> bool:
    """Whether a flag, a variable or the file names the master of the command that runs, be it with the default address."""
    return bool(click.get_current_context().meta[NAMES_MASTER])


def config_file() -> str | None:
    """What --config names for the command that runs."""
    named: str | None = click.get_current_context().meta[CONFIG_FILE]
    return named


def console() -> Console:
    """Standard output for people: as wide as the terminal, or as COLUMNS says; where it is a pipe or a file, each line as wide as what is
    printed in it. Text is shown as it is: a name or an IPv6 address may have brackets and colons that rich would take for markup."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console(markup=False, emoji=False)
    return Console(markup=False, emoji=False, width=PIPED_COLUMNS, file=cast(IO[str], UnpaddedOutput()))


class UnpaddedOutput(io.TextIOBase):
    """Standard output without the blanks by which a table's lines are all as long as the longest: in a pager each would fill several."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """What it can say."""
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        sys.stdout.write(_FILLING.sub("", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def show(value: Any, view: Callable[[], RenderableType], *, as_json: bool) -> None:
    """Print a result: `value` as JSON, or its view for people."""
    if as_json:
        echo_json(value)
    else:
        console().print(view())


def show_each(values: Iterable[Any], view: Callable[[], RenderableType], *, as_json: bool) -> None:
    """As `show`, with JSON of one object a line."""
    if as_json:
        for value in values:
            echo_json(value)
    else:
        console().print(view())


def echo_json(value: Any) -> None:
    """One line on standard output, at once."""
    click.echo(json.dumps(value))
