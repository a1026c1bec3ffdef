"""Search of every installed source for calls that docs/security.md excludes: no input is ever executed."""

import ast
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
BESIDE: Final = {"tests", "benchmarks", "docs", "deploy", "examples", "build"}
RUNNERS: Final = {"eval", "exec", "compile", "__import__"}
UNPICKLERS: Final = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
WRITES_ONLY: Final = {("kvcache/key_names.py", "dumps")}
"""vLLM's names of blocks are hashes of pickled tuples."""
LOADERS: Final = {"load", "loads", "Unpickler", "unsafe_load", "full_load"}
OTHERS: Final = {"torch", "yaml", "np", "numpy"}
"""Whose `load` may run what it reads."""


def sources() -> list[Path]:
    """Files of all packages, without a walk over environments and caches."""
    folders = [folder for folder in sorted(ROOT.iterdir()) if folder.is_dir() and folder.name not in BESIDE and folder.name[0] != "."]
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def runs(path: Path, tree: ast.AST) -> list[str]:
    """Return the lines that execute or unpickle data."""
    place, found = str(path.relative_to(ROOT)), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNNERS:
            found.append((node.lineno, node.func.id))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            of, name = node.value.id, node.attr
            if (of in UNPICKLERS and (place, name) not in WRITES_ONLY) or (of in OTHERS and name in LOADERS):
                found.append((node.lineno, f"{of}.{name}"))
        if isinstance(node, ast.ImportFrom) and node.module in UNPICKLERS:
            found.append((node.lineno, f"from {node.module}"))
    return [f"{place}:{line}: {what}" for line, what in found]


@pytest.mark.promise("input-untrusted")
def test_no_source_runs_what_it_reads() -> None:
    found = sources()
    assert len(found) > 500
    assert [told for path in found for told in runs(path, ast.parse(path.read_text(encoding="utf-8")))] == []


def test_what_would_is_found() -> None:
    for source in ("eval(text)", "import pickle\npickle.loads(data)", "from marshal import loads", "torch.load(path)", "np.load(path)"):
        assert runs(ROOT / "store/node.py", ast.parse(source)), source
    assert not runs(ROOT / "kvcache/key_names.py", ast.parse("import pickle\npickle.dumps(value)"))
