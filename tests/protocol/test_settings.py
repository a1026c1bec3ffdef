"""Promises of settings.py: flags beat the environment, that beats the file, that beats defaults; a bad value names its
source.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size, format_size, load_settings, loaded_mark, options, parse_size, setting
from kvstore.protocol.variables import SECTIONS


@dataclass(frozen=True)
class Oven:
    """A program's settings, one of each kind."""

    room: Size = setting(Size(4 << 10), "Room inside.", minimum=1024, maximum=1 << 40)
    trays: int = setting(2, "Number of trays.", minimum=1, maximum=10)
    heat: float = setting(1.5, "Heat.", minimum=0.5)
    fan: bool = setting(False, "Blow.")
    mode: str = setting("bake", "What to do.", choices=("bake", "grill"))
    note: str = setting("", "Anything.")


def load(file: Path | None = None, environ: dict[str, str] | None = None, **flags: Any) -> Oven:
    return load_settings(Oven, "oven", flags=flags, environ=environ or {}, config=str(file) if file else None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvstore.toml"


def test_without_any_source_defaults_hold() -> None:
    assert load() == Oven()


def test_flags_beat_environment_beats_file_beats_defaults(file: Path) -> None:
    file.write_text("[oven]\ntrays = 3\nheat = 3.0\nmode = 'grill'\n")
    environ = {"KVSTORE_OVEN_TRAYS": "4", "KVSTORE_OVEN_HEAT": "4"}
    assert load(file, environ, trays="5") == Oven(trays=5, heat=4.0, mode="grill")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("4KiB", 4096),
        ("4k", 4096),
        ("1.5 GiB", 3 << 29),
        ("10GB", 10**10),
        (" 2 mib ", 2 << 20),
        ("1Ti", 1 << 40),
    ],
)
def test_sizes_are_numbers_with_an_optional_unit(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert type(parse_size(text)) is Size


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5.2GiB", "4 furlongs", "1e3", "9" * 5000, "9" * 400 + ".5", "nan"])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (4096, "4 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 60, "1048576 TiB"),
    ],
)
def test_sizes_are_shown_short(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("flags", "oven"),
    [
        ({"room": "8KiB"}, Oven(room=Size(8192))),
        ({"room": 8192}, Oven(room=Size(8192))),
        ({"heat": 2}, Oven(heat=2.0)),
        ({"fan": True}, Oven(fan=True)),
        ({"fan": "ON"}, Oven(fan=True)),
        ({"fan": "no"}, Oven(fan=False)),
        ({"fan": 1}, Oven(fan=True)),
    ],
)
def test_values_are_taken_in_the_forms_that_sources_give(flags: dict[str, Any], oven: Oven) -> None:
    assert load(**flags) == oven


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"trays": "many"}, "--trays: 'many' is not a whole number"),
        ({"trays": 1.5}, "--trays: 1.5 is not a whole number"),
        ({"trays": True}, "--trays: True is not a whole number"),
        ({"trays": "0"}, "--trays: 0 is below the minimum of 1"),
        ({"trays": "11"}, "--trays: 11 is above the maximum of 10"),
        ({"heat": "hot"}, "--heat: 'hot' is not a number"),
        ({"heat": "nan"}, "--heat: 'nan' is not a number"),
        ({"heat": "inf"}, "--heat: 'inf' is not a number"),
        ({"heat": [1]}, "--heat: [1] is not a number"),
        ({"fan": "maybe"}, "--fan: 'maybe' is not true or false"),
        ({"note": 5}, "--note: 5 is not a text"),
        ({"room": "big"}, "--room: 'big' is not a size: write a number of bytes with an optional unit, such as 4KiB, 64MiB or 1.5GiB"),
        ({"room": True}, "--room: 'True' is not a size: write a number of bytes with an optional unit, such as 4KiB, 64MiB or 1.5GiB"),
        ({"room": "1"}, "--room: 1 is below the minimum of 1 KiB"),
        ({"room": "2TiB"}, "--room: 2TiB is above the maximum of 1 TiB"),
        ({"mode": "fry"}, "--mode: 'fry' is not one of bake, grill"),
    ],
)
def test_a_bad_value_is_refused_with_its_source_and_reason(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(**flags)
    assert str(refused.value) == message


def test_a_bad_value_of_the_environment_or_file_names_it(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^KVSTORE_OVEN_TRAYS: "):
        load(environ={"KVSTORE_OVEN_TRAYS": "x"})
    file.write_text("[oven]\ntrays = 'x'\n")
    with pytest.raises(ConfigError, match=r"^\[oven\] trays: "):
        load(file)


def test_settings_refuse_unknown_key_and_list_known_ones(file: Path) -> None:
    file.write_text("[oven]\ntray = 1\nheta = 2\n")
    with pytest.raises(ConfigError, match=r"section \[oven\]: unknown setting heta, tray; did you mean heat, trays\?$"):
        load(file)
    file.write_text("[oven]\ntray = 1\nwattage = 2\n")
    with pytest.raises(ConfigError, match=r"section \[oven\]: unknown setting tray, wattage; known are fan, heat, mode, note, room, trays"):
        load(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[maser]\n", "unknown section [maser]: did you mean [master]?"),
        ("[oven]\n[Oven]\n", "unknown section [Oven]: did you mean [oven]?"),
        ("[oven.top]\n[share]\n", "unknown section [share]: did you mean [shared]?"),
        ("[[nodes]]\n", "unknown section [nodes]: did you mean [node]?"),
        ("heat = 3\n[oven]\n", "heat is outside of any section: move it below the line [SECTION] of its program"),
    ],
)
def test_settings_refuse_unknown_section_with_nearest_one(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert str(refused.value) == f"{file}: {message}"


def test_sections_of_other_programs_are_theirs(file: Path) -> None:
    file.write_text("".join(f"[{section}]\nx = 1\n" for section in sorted(SECTIONS)) + "[oven]\ntrays = 3\n")
    assert load(file).trays == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"oven = 3", "oven is not a section"),
        (b"[oven", "is not TOML"),
        (b"x = '\xff'", "cannot read"),
        (b"x = " + b"9" * 5000, "is not TOML"),
    ],
)
def test_a_damaged_file_is_refused(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(file)


@click.command()
@options(Oven)
def bake(config: str | None, **flags: Any) -> None:
    click.echo(repr(load_settings(Oven, "oven", flags=flags, environ={}, config=config)))


def test_every_setting_is_an_option_of_the_command_line(file: Path) -> None:
    file.write_text("[oven]\nnote = 'from the file'\n")
    arguments = ["--room", "1MiB", "--trays", "7", "--fan", "--mode", "grill", "--config", str(file)]
    result = CliRunner().invoke(bake, arguments)
    assert result.output.strip() == repr(Oven(room=Size(1 << 20), trays=7, fan=True, mode="grill", note="from the file"))
    assert "fan=False" in CliRunner().invoke(bake, ["--no-fan"]).output


@dataclass(frozen=True)
class Pan:
    """Settings that other programs have too, but for one."""

    master: str = setting("here:1", "Where.", shared=True)
    lid: bool = setting(False, "Covered.")


@click.command()
@options(Pan)
def fry(config: str | None, **flags: Any) -> None:
    click.echo(repr(load_settings(Pan, "pan", flags=flags, environ={}, config=config)))


def test_master_option_with_two_values_is_refused() -> None:
    """Not the last one counts: the other masters would be left out without a word."""
    result = CliRunner().invoke(fry, ["--master", "a:1", "--master", "b:1"])
    assert (result.exit_code, "'--master': given 2 times: give it once" in result.output) == (2, True)
    assert "master='a:1'" in CliRunner().invoke(fry, ["--master", "a:1", "--master", "a:1"]).output
    assert "master='here:1'" in CliRunner().invoke(fry, []).output


SOURCES: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "flag": ({"master": "flag:1"}, {}, ""),
    "own variable": ({}, {"KVSTORE_PAN_MASTER": "own:1"}, ""),
    "shared variable": ({}, {"KVSTORE_MASTER": "shared:1"}, ""),
    "own section": ({}, {}, "[pan]\nmaster = 'section:1'\n"),
    "shared section": ({}, {}, "[shared]\nmaster = 'all:1'\n"),
}
"""Flags, variables and lines of the file, the strongest first."""


@pytest.mark.parametrize(
    ("strongest", "master"), [(0, "flag:1"), (1, "own:1"), (2, "shared:1"), (3, "section:1"), (4, "all:1"), (5, "here:1")]
)
def test_a_shared_setting_is_taken_from_its_strongest_source(file: Path, strongest: int, master: str) -> None:
    given = list(SOURCES.values())[strongest:]
    file.write_text("".join(lines for _, _, lines in given))
    flags: dict[str, str] = {name: value for some, _, _ in given for name, value in some.items()}
    environ = {name: value for _, some, _ in given for name, value in some.items()}
    assert load_settings(Pan, "pan", flags=flags, environ=environ, config=str(file)).master == master


def test_a_shared_setting_of_other_programs_is_left_alone(file: Path) -> None:
    file.write_text("[shared]\ntoken = 'of others'\n")
    assert load_settings(Pan, "pan", flags={}, environ={"KVSTORE_TLS_CA": "ca.pem"}, config=str(file)) == Pan()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[shared]\ntls_cca = 'ca.pem'\n", r"section \[shared\]: unknown setting tls_cca; did you mean tls_ca\?$"),
        ("[shared]\nlid = true\n", r"section \[shared\]: unknown setting lid; known are "),
    ],
)
def test_settings_refuse_unshared_key_in_shared_section(file: Path, lines: str, message: str) -> None:
    file.write_text(lines)
    with pytest.raises(ConfigError, match=message):
        load_settings(Pan, "pan", flags={}, environ={}, config=str(file))


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="KVSTORE_OVEN_TRAY is no setting: did you mean KVSTORE_OVEN_TRAYS"):
        load(environ={"KVSTORE_OVEN_TRAY": "3"})


@dataclass(frozen=True)
class Marked:
    trays: int = setting(2, "Number of trays.")
    is_loaded: bool = loaded_mark()


def test_loaded_mark_is_set_by_load_and_is_no_setting() -> None:
    loaded = load_settings(Marked, "oven", flags={}, environ={"KVSTORE_OVEN_TRAYS": "3"})
    assert (loaded.trays, loaded.is_loaded, Marked().is_loaded) == (3, True, False)
    assert loaded == Marked(trays=3)
    assert "is_loaded" not in repr(loaded)
    with pytest.raises(ConfigError, match="KVSTORE_OVEN_IS_LOADED is no setting"):
        load_settings(Marked, "oven", flags={}, environ={"KVSTORE_OVEN_IS_LOADED": "true"})
