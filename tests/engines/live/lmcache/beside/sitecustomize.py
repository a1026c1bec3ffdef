"""Start-up module of a Python of vLLM's environment that needs LMCache too, for tests.

It finds packages that vLLM's environment lacks in LMCache's environment, the folder TEST_LMCACHE. One environment for both would take
another gigabyte, and both keep their own pins. If both have a package, vLLM's is used.
"""

import importlib.machinery
import os
import sys
import types
from collections.abc import Iterable, Sequence
from importlib.metadata import DistributionFinder, MetadataPathFinder, PathDistribution
from typing import Any

LIBRARY = "llvmlite.binding.ffi"


class Beside(importlib.machinery.PathFinder):
    """Top-level packages, and what is installed of them."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return None if path is not None else super().find_spec(fullname, [os.environ["TEST_LMCACHE"]], target)

    @classmethod
    def find_distributions(cls, context: DistributionFinder.Context | None = None) -> Iterable[PathDistribution]:
        name = context.name if context is not None else None
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(name=name, path=[os.environ["TEST_LMCACHE"]]))


class Telling:
    """vLLM looks for kernels in all that modules hold, as `vars(value).get("kernel")`; of what Numba holds of LLVM that is no mapping."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == LIBRARY else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: types.ModuleType) -> None:
                load(module)
                module._lib_fn_wrapper.get = lambda self, name: None

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Telling)
sys.meta_path.append(Beside)
