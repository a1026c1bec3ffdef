"""Run by an environment's own interpreter: imports all of the installed kvstore, starts a master and a node of it, puts and gets.

Prints, as JSON, where kvstore lies, the versions that it met, and the modules that lack a package which only an extra brings.
"""

import importlib
import json
import pkgutil
from importlib.metadata import version

import kvstore
import kvstore.client
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client.sync import Client
from kvstore.protocol.errors import ConfigError

PACKAGES = [found.name for found in pkgutil.iter_modules(kvstore.__path__, "kvstore.") if found.ispkg and found.name != "kvstore.engines"]
"""The engines' plug-ins need the engine."""


def import_all() -> dict[str, str]:
    """The modules that could not be imported, and which package they lack. Raises what any of them raises for another reason."""
    lacking = {}
    for package in PACKAGES:
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            try:
                importlib.import_module(found.name)
            except (ModuleNotFoundError, ConfigError) as error:
                missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
                if not isinstance(missing, ModuleNotFoundError):
                    raise
                lacking[found.name] = missing.name or ""
    return lacking


def put_and_get() -> bool:
    with LocalCluster(ClusterPlan(dram="64MiB", is_private=True), on_log=lambda name, line: None) as cluster:
        cluster.wait_ready()
        value = bytes(range(256)) * 1024
        with Client(cluster.address) as client, cluster.control() as control:
            return client.put(b"block", value, ack="cluster") and client.get(b"block") == value and control.status().blocks == 1


if __name__ == "__main__":
    versions = {name: version(name) for name in ("grpcio", "grpcio-health-checking", "grpcio-reflection", "numpy", "protobuf")}
    facts = {"path": kvstore.client.__path__[0], "versions": versions, "lacking": import_all(), "works": put_and_get()}
    print(json.dumps(facts))
