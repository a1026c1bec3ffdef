"""Every command of the documentation names a program, flags and settings that exist; a page says which extra a command needs."""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from kvstore.engines.lmcache.settings import LMCacheSettings
from kvstore.engines.sglang.settings import SGLangSettings
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.protocol.settings import load_settings
from tests.docs.programs import ENGINES, check, flags_of, sections, variables
from tests.docs.shell_blocks import PAGES, ROOT, SHELL, Command, all_commands, blocks, code, commands

TRACE = '{"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [0]}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that commands read."""
    for name in ("TRACE", "trace.jsonl", "events.jsonl"):
        (tmp_path / name).write_text(TRACE)
    (tmp_path / "FILE").write_bytes(b"value")
    return tmp_path


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_programs_take_the_commands_of_a_page(page: Path, folder: Path) -> None:
    for each in blocks(page):
        if each.language == SHELL:
            assert commands(each) or "echo" in each.code, f"{each.name}: no command"
            for command in commands(each):
                _check(command, folder)


def _check(command: Command, folder: Path) -> None:
    try:
        check(command, folder)
    except Exception as error:
        raise AssertionError(f"{command.block.name}: {shlex.join(command.words)}: {error}") from error


def spans() -> Iterator[tuple[Path, str]]:
    """All code within a line of text."""
    for page in PAGES:
        for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
            for child in token.children or ():
                if child.type == "code_inline":
                    yield page, child.content


def test_flags_of_commands_within_text_exist() -> None:
    """`kvstore drain NODE --cancel` in a sentence. Placeholders and arguments are not looked at."""
    checked = 0
    for page, text in spans():
        named = text.replace("'", "").split()
        flags = flags_of(named)
        if flags is not None:
            given = {word.partition("=")[0] for word in named if word.startswith("--")}
            assert given <= flags, f"{page.name}: {text}"
            checked += bool(given)
    assert checked > 10


def test_variables_that_the_pages_name_are_settings() -> None:
    named = re.compile(r"\bKVSTORE_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_]*\*)\b")
    for page in PAGES:
        unknown = set(named.findall(page.read_text(encoding="utf-8"))) - variables() - {"KVSTORE_MASTER_SERVICE_HOST"}
        assert not unknown, f"{page.name}: {unknown}"


def test_settings_of_toml_blocks_exist(tmp_path: Path) -> None:
    """Blocks that are files of other programs, or of tokens and quotas, have tests of their own."""
    names = dict(sections())
    checked = 0
    for page in PAGES:
        for text in code(page, "toml"):
            if set(re.findall(r"^\[(\w+)\]", text, re.MULTILINE)) <= set(names):
                (tmp_path / "kvstore.toml").write_text(text)
                for section, kind in names.items():
                    load_settings(kind, section, flags={}, environ={}, config=str(tmp_path / "kvstore.toml"))
                checked += 1
    assert checked


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """All JSON objects within a JSON value."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(each)


def given_to_engines() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the block's name and each JSON object that a command or a file passes to an engine."""
    texts = [(each.name, each.code) for page in PAGES for each in blocks(page) if each.language == "json"]
    for command in all_commands():
        if any(engine in word for engine in ENGINES for word in command.words[:3]):
            texts += [(command.block.name, word) for word in command.words if word.startswith("{")]
    for name, text in texts:
        for found in objects(json.loads(text)):
            yield name, found


PLUGINS: dict[str, tuple[str, str, type[Any]]] = {
    "kvstore.engines.vllm.connector": ("kv_connector_extra_config", "vllm", VllmSettings),
    "kvstore.engines.vllm.tier": ("", "vllm", VllmSettings),
    "kvstore.engines.lmcache.l2": ("adapter_params", "lmcache", LMCacheSettings),
    "kvstore.engines.sglang.storage": ("", "sglang", SGLangSettings),
}
"""By the module that an engine loads: the entry that has our settings ("": they stand beside the module's name), and their section."""
ENGINES_OWN = {"type", "module_path", "class_name", "backend_name", "interface_v1"}


def test_settings_of_plugins_exist() -> None:
    checked = set()
    for name, found in given_to_engines():
        module = found.get("kv_connector_module_path") or found.get("module_path")
        if module in PLUGINS:
            entry, section, kind = PLUGINS[module]
            given = found[entry] if entry else {key: value for key, value in found.items() if key not in ENGINES_OWN}
            assert set(given) <= {field.name for field in dataclasses.fields(kind)}, name
            load_settings(kind, section, flags=given, environ={})
            checked.add(module)
    assert checked == set(PLUGINS)
