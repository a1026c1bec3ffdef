"""The programs that the documentation's commands start, and whether they take the flags and settings that a command gives them."""

import contextlib
import importlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from kvstore.cli.check import settings_kind
from kvstore.cli.main import kvstore
from kvstore.protocol.settings import load_settings, settings_of
from kvstore.protocol.variables import CONFIG, SECTIONS, SHARED, shared_variable_name, variable_name
from tests.docs.shell_blocks import ROOT, Command

PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: Final = frozenset(PROJECT["optional-dependencies"])
MODULES: Final = {name: entry.partition(":")[0] for name, entry in PROJECT["scripts"].items()}
"""The module of each command that the wheel installs."""
ENGINES: Final = ("vllm", "sglang", "lmcache")
"""Whose programs tests/engines/live/test_documented.py checks: they are not installed here."""
ELSEWHERE: Final = frozenset(
    ("cat", "chmod", "chown", "cp", "curl", "cut", "docker", "etcd", "etcdctl", "git", "grep", "head", "id", "install", "kubectl", "mkdir")
    + ("mount", "mv", "openssl", "rm", "scp", "sed", "sleep", "sort", "sysctl", "systemctl", "systemd-sysusers", "systemd-tmpfiles", "tail")
    + ("tar", "tee", "uniq", "usermod")
)
"""Programs of others, whose flags no test here checks; tests/docs and tests/deploy run most of these commands."""
_OF_THE_CHECKOUT: Final = re.compile(r"\.?/?(?:deploy|docs|examples|benchmarks|engines)/\S+")
_NO_FILE: Final = re.compile(r"build/|RESULTS")


class UnknownError(Exception):
    """A program, flag, setting, target or file that a command names and the project does not have."""


@cache
def variables() -> frozenset[str]:
    """Every environment variable that is a setting of some program."""
    named = {variable_name(section, field.name) for section, kind in sections() for field in settings_of(kind)}
    return frozenset(named | {CONFIG} | {shared_variable_name(name) for name in SHARED})


def check(command: Command, folder: Path) -> None:
    """Raise UnknownError, click.UsageError or ConfigError for what the program of `command` would refuse before it does anything.

    Files that a command reads are looked for in `folder`.
    """
    if unknown := set(command.settings) - variables():
        raise UnknownError(f"no setting: {', '.join(sorted(unknown))}")
    for word in command.words:
        if _OF_THE_CHECKOUT.fullmatch(word) and not _NO_FILE.search(word) and not list(ROOT.glob(word)):
            raise UnknownError(f"not in the checkout: {word}")
    program, arguments = command.words[0], command.words[1:]
    if program in MODULES:
        _check_own(program, arguments, folder)
    elif program in ("python", "python3"):
        _check_python(arguments, folder)
    elif program == "make":
        _check_targets(arguments)
    elif program == "pip":
        _check_pip(arguments)
    elif program not in ELSEWHERE and program not in ENGINES:
        raise UnknownError(f"a program that no test knows: {program}")


def flags_of(words: Sequence[str]) -> set[str] | None:
    """All flags of the command of ours that `words` begin with: (kvstore, drain). None where it is no command."""
    if not words or words[0] not in MODULES:
        return None
    command, rest = _command(words[0]), list(words[1:])
    flags = {"--help", "-h", "--version"}
    while isinstance(command, click.Group) and rest and re.fullmatch(r"[a-z-]+", rest[0]) and not rest[0].startswith("-"):
        inner = command.get_command(click.Context(command), rest.pop(0))
        if inner is None:
            return None
        command = inner
    return flags | {name for each in command.params for name in (*each.opts, *each.secondary_opts)}


def _command(program: str) -> click.Command:
    if program == "kvstore":
        return kvstore
    command: click.Command = importlib.import_module(MODULES[program]).main
    return command


def _check_own(program: str, arguments: Sequence[str], folder: Path) -> None:
    command, rest = _command(program), list(arguments)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        inner = command.get_command(click.Context(command), name)
        if inner is None:
            raise UnknownError(f"{program} has no command {name}")
        command = inner
    flags = _parse(command, rest, folder)
    section = program.removeprefix("kvstore-")
    if section in SECTIONS:  # values too: numbers in their bounds, sizes, choices
        load_settings(settings_kind(section), section, flags=flags, environ={})


def _parse(command: click.Command, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the parameters with which click would call the command."""
    if "--help" in arguments:
        return {}
    with contextlib.chdir(folder):
        return command.make_context(command.name, list(arguments)).params


def _check_python(arguments: Sequence[str], folder: Path) -> None:
    if arguments[0] != "-m":
        if not (ROOT / arguments[0]).is_file():
            raise UnknownError(f"no program of the checkout: {arguments[0]}")
        return
    module = arguments[1]
    if module.partition(".")[0] == "kvstore":
        _parse(importlib.import_module(module).main, arguments[2:], folder)
    elif module.partition(".")[0] not in ENGINES and find_spec(module.partition(".")[0]) is None:
        raise UnknownError(f"no module: {module}")


def _check_targets(arguments: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        wanted = rf"\$\((?:or \$\()?{name}\b" if is_variable else rf"(?m)^{name}:"
        if not re.search(wanted, makefile):
            raise UnknownError(f"not in the Makefile: {word}")


def _check_pip(arguments: Sequence[str]) -> None:
    for word in arguments:
        named = re.fullmatch(r"\.\[([\w,]+)\]", word)
        if named and (unknown := set(named[1].split(",")) - EXTRAS):
            raise UnknownError(f"no extra: {', '.join(sorted(unknown))}")


def sections() -> Iterator[tuple[str, type[Any]]]:
    """The name of each section of the TOML file, and its settings."""
    for section in SECTIONS:
        yield section, settings_kind(section)
