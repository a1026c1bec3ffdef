"""Promises of told_daemons.py: what a host's daemons are told, by variables before the file."""

from pathlib import Path

import pytest

from kvstore.client.tools.told_daemons import certificates, told

FILE = """
router = "no section"
[node]
nvme = "/mnt/nvme:1TiB"
tls_cert = "/etc/kvstore/node.pem"
http_tls_cert = "/etc/kvstore/node.pem"
[master]
http_tls_cert = "/etc/kvstore/master.pem"
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "kvstore.toml"
    path.write_text(FILE)
    return str(path)


def test_a_setting_is_told_by_its_variable_before_the_file_and_may_be_told_by_none(config: str) -> None:
    assert told("node", "nvme", config, {}) == "/mnt/nvme:1TiB"
    assert told("node", "nvme", None, {"KVSTORE_CONFIG": config}) == "/mnt/nvme:1TiB"
    assert told("node", "nvme", config, {"KVSTORE_NODE_NVME": "/elsewhere:1GiB"}) == "/elsewhere:1GiB"
    assert [told(section, "nvme", config, {}) for section in ("sidecar", "master", "router")] == ["", "", ""]
    assert told("node", "nvme", None, {}) == ""


def test_each_certificate_is_told_once_by_who_shows_it(config: str) -> None:
    shown = {"[master] http_tls_cert": "/etc/kvstore/master.pem", "[node] tls_cert": "/etc/kvstore/node.pem"}
    assert certificates(config, {}) == shown
    assert certificates(config, {"KVSTORE_SIDECAR_TLS_CERT": "s.pem"}) == shown | {"[sidecar] tls_cert": "s.pem"}
    assert certificates(None, {}) == {}
