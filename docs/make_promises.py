"""Print docs/promise-tests.md: the tests that hold each promise. `python docs/make_promises.py > docs/promise-tests.md`."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ("tests", "testing")
MARKER: Final = "pytest.mark.promise"

HEAD: Final = """# Tests of the promises

Made by `python docs/make_promises.py > docs/promise-tests.md` from the markers in the tests; a test compares both.
[Promises](promises.md) has the sentences.
"""


def promises() -> list[str]:
    """Return the ids of docs/promises.md, in its order."""
    return re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "promises.md").read_text(encoding="utf-8"), re.MULTILINE)


def marked_tests() -> Iterator[tuple[str, str]]:
    """Yield promise and test (`PATH::NAME`) of every marker."""
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if MARKER in text:
                for promise, name in _markers(ast.parse(text), ""):
                    yield promise, f"{path.relative_to(ROOT)}::{name}"


def _markers(parent: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == MARKER:
                yield ast.literal_eval(decorator.args[0]), prefix + node.name
        yield from _markers(node, f"{prefix}{node.name}::")


def page() -> str:
    """Return the text of the page."""
    tests: dict[str, list[str]] = {promise: [] for promise in promises()}
    for promise, test in marked_tests():
        tests[promise].append(test)
    parts = [HEAD]
    for promise, held_by in tests.items():
        parts.append(f"\n## {promise}\n\n```text\n" + "".join(f"{test}\n" for test in held_by) + "```\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
