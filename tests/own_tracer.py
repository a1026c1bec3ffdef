"""A pytest plug-in (`-p tests.own_tracer`) that has each file of tests traced in its own modules only, for own_coverage.py.

Until the tests are collected all modules in question are traced, without a context: what runs at import counts for every file. Then the
tracer is on in the modules that the file at hand has to cover and off in all else, and off altogether in tests marked `no_cover`: half of
the time that tracing everything takes goes to lines that no report asks for. Each worker (tests/workers.py) writes a file of its own at its
end; so does the process that they are forked from, of what ran at import.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

from tests.own_coverage import ROOT, WRITTEN, modules, own_test


class OwnTracer:
    """Owns the tracer that is on, one at a time, and what those before it have found."""

    def __init__(self) -> None:
        self._modules: dict[str, list[Path]] = defaultdict(list)
        for module in modules():
            self._modules[own_test(module)].append(module)
        self._found: dict[str, dict[str, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
        """By file of tests ("": at import) and module: from which line to which."""
        self._file = ""
        self._tracer: Coverage | None = None
        self._is_on = False
        self._trace([module for own in self._modules.values() for module in own])

    def _trace(self, of: Sequence[Path]) -> None:
        tracer = Coverage(data_file=None, config_file=False, branch=True, include=list(map(str, of)), messages=False)
        tracer.set_option("run:relative_files", True)
        tracer.set_option("run:disable_warnings", ["no-data-collected"])  # a file all of whose tests are marked
        tracer.start()
        self._tracer, self._is_on = tracer, True

    def _end(self) -> None:
        if self._tracer is not None:
            self._tracer.stop()
            data = self._tracer.get_data()
            for module in data.measured_files():
                self._found[self._file][module].update(data.arcs(module) or ())
            self._tracer = None

    def _switch(self, on: bool) -> None:
        if self._tracer is not None and on != self._is_on:
            (self._tracer.start if on else self._tracer.stop)()
            self._is_on = on

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._end()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        file = item.nodeid.partition("::")[0]
        if file != self._file:
            self._end()
            self._file = file
            if file in self._modules:
                self._trace(self._modules[file])
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """What sets a test up is traced all the same: tests of its module share it."""
        self._switch(on=item.get_closest_marker("no_cover") is None)
        try:
            return (yield)
        finally:
            self._switch(on=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._end()
        data = CoverageData(basename=str(ROOT / f"{WRITTEN}.{os.getpid()}"))
        for file, found in self._found.items():
            data.set_context(file)
            data.add_arcs(found)
        data.write()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything of the product is imported."""
    early_config.pluginmanager.register(OwnTracer(), "own_tracer")
