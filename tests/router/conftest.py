"""Fixtures of the router's tests: coroutines as tests, and a store of two nodes."""

import inspect
from collections.abc import Iterator

import pytest

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from tests.forked import Forked
from tests.router.scripted import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A master with `node-0` and `node-1`, for tests that use keys of their own. Instances that report once stay."""
    config = tmp_path_factory.mktemp("two_nodes") / "config.toml"
    config.write_text("[master]\ninstance_ttl_s = 600\n")
    plan = ClusterPlan(dram="8MiB", nodes=2, config=str(config), is_private=True)
    with LocalCluster(plan, on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_ready()
        yield cluster
