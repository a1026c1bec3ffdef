"""Renders what deploy/ has: the chart's templates, which use nothing but values, and kustomize's patches, which are JSON patches."""

import copy
import re
from pathlib import Path
from typing import Any, Final

import yaml

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
CHART: Final = DEPLOY / "helm" / "kvstore"
BASE: Final = DEPLOY / "kubernetes" / "base"
_VALUE: Final = re.compile(r"{{ \.Values\.([\w.]+) }}")


def documents(text: str) -> list[Any]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def values() -> dict[str, Any]:
    """The chart's defaults."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def rendered(template: Path, given: dict[str, Any]) -> str:
    """A template with values in place; KeyError for one that is not given, AssertionError for anything else between braces."""

    def value(match: re.Match[str]) -> str:
        found: Any = given
        for name in match[1].split("."):
            found = found[name]
        return str(found)

    text = _VALUE.sub(value, template.read_text())
    assert "{{" not in text, f"{template.name} has more than values between braces"
    return text


def chart(given: dict[str, Any] | None = None) -> list[Any]:
    return [
        document for template in sorted((CHART / "templates").iterdir()) for document in documents(rendered(template, given or values()))
    ]


def base() -> list[Any]:
    """The documents of the base, as kustomize makes them: with the tag of the image."""
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    (image,) = kustomization["images"]
    found = [document for name in kustomization["resources"] for document in documents((BASE / name).read_text())]
    return [_tagged(document, image["name"], f"{image['name']}:{image['newTag']}") for document in found]


def overlay(name: str) -> list[Any]:
    """The base with the overlay's patches."""
    found = base()
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "overlays" / name / "kustomization.yaml").read_text())
    for patch in kustomization["patches"]:
        target = patch["target"]
        (document,) = [one for one in found if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])]
        for operation in yaml.safe_load(patch["patch"]):
            _apply(document, operation)
    return found


def _tagged(document: Any, name: str, image: str) -> Any:
    if isinstance(document, dict):
        return {key: image if key == "image" and value == name else _tagged(value, name, image) for key, value in document.items()}
    return [_tagged(value, name, image) for value in document] if isinstance(document, list) else document


def _apply(document: Any, operation: dict[str, Any]) -> None:
    """One operation of RFC 6902: add, replace or remove; KeyError for a path that is not there."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    for part in parents:
        document = document[int(part)] if isinstance(document, list) else document[part]
    if operation["op"] == "remove":
        del document[last]
        return
    assert operation["op"] in ("add", "replace")
    assert (last in document) == (operation["op"] == "replace"), operation["path"]
    document[last] = copy.deepcopy(operation["value"])
