"""Arguments and configurations of SGLang in the name of a page."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.engines.sglang.arguments import IN_KEY, architecture, config_digest, told


def arguments(**given: Any) -> str:
    """`told` of an engine with these arguments, wherever they belong."""
    return told(lambda group: SimpleNamespace(**{name: value for name, value in given.items() if name in IN_KEY[group]}))


@pytest.mark.parametrize("name", [name for names in IN_KEY.values() for name in names])
def test_told_covers_each_argument(name: str) -> None:
    assert arguments(**{name: "one"}) != arguments(**{name: "two"}) != arguments()


def test_told_of_what_is_not_set() -> None:
    assert arguments() == arguments(quantization=None, json_model_override_args="{}", enable_unified_memory=False) == ""
    assert arguments(max_running_requests=4) == ""


def test_told_of_files_by_content(tmp_path: Path) -> None:
    """Not by their path; a file that is not there is known by it."""
    for name, content in (("a", "1.0"), ("b", "1.0"), ("c", "2.0")):
        (tmp_path / name).write_text(content)
    first, same, other = (arguments(quantization_param_path=str(tmp_path / name)) for name in "abc")
    assert first == same != other
    assert "nowhere" in arguments(quantization_param_path=str(tmp_path / "nowhere"))
    assert "nul" in arguments(model_loader_extra_config="nul\0")


def test_config_digest_by_content(tmp_path: Path) -> None:
    def digest(folder: str, text: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "config.json").write_text(text)
        return config_digest(tmp_path / folder)

    first = digest("a", json.dumps({"rope_theta": 1, "_name_or_path": "/a"}))
    assert digest("b", json.dumps({"_name_or_path": "/b", "rope_theta": 1}, indent=1)) == first
    assert digest("b", json.dumps({"rope_theta": 2})) != first
    assert digest("b", "[1]") != digest("b", "no JSON") != first
    assert config_digest(None) == config_digest(tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [('{"architectures": ["Llama"]}', "Llama"), ("{}", ""), ("[]", ""), ("no JSON", ""), ('{"architectures": [1]}', "")],
)
def test_architecture_of_configuration(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert architecture(tmp_path) == found
    assert architecture(None) == architecture(tmp_path / "nowhere") == ""
