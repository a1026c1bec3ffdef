"""Tests of variables.py: misspelt variables are reported, other programs' are ignored."""

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.variables import check_variables, variable_name

NAMES = ("listen", "dram", "nvme", "master")


def check(*variables: str, section: str = "node") -> None:
    check_variables(dict.fromkeys(variables, "x"), section, NAMES)


def test_a_setting_has_the_variable_of_its_program() -> None:
    assert variable_name("node", "node_ttl_s") == "KVSTORE_NODE_NODE_TTL_S"


@pytest.mark.promise("settings-checked")
@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("KVSTORE_NODE_DRM", "KVSTORE_NODE_DRAM"),
        ("KVSTORE_NDOE_LISTEN", "KVSTORE_NODE_LISTEN"),
        ("KVSTORE_MASTR", "KVSTORE_MASTER"),
        ("KVSTORE_CONFG", "KVSTORE_CONFIG"),
        ("KVSTORE_TLS_CERTS", "KVSTORE_TLS_CERT"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(variable: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable} is no setting: did you mean {nearest}\\?$"):
        check(variable)


def test_variables_refuse_unknown_one_with_own_prefix() -> None:
    with pytest.raises(ConfigError, match="KVSTORE_NODE_QUUX_ZYGOTE is no setting: those of node are in docs/settings"):
        check("KVSTORE_NODE_QUUX_ZYGOTE")


def test_variables_refuse_one_of_the_shared_section() -> None:
    with pytest.raises(ConfigError, match="KVSTORE_SHARED_TLS_CA is no setting: the variable of a shared setting is KVSTORE_NAME"):
        check("KVSTORE_SHARED_TLS_CA")


def test_what_is_right_or_anothers_is_left_alone() -> None:
    check(
        "KVSTORE_NODE_DRAM",
        "KVSTORE_CONFIG",
        "KVSTORE_MASTER",
        "KVSTORE_SALT",
        "KVSTORE_CLIENT_TYPO",
        "KVSTORE_PASSWORD",
        "NODE_DRM",
        "PATH",
    )


@pytest.mark.parametrize(
    "variable",
    [
        *("KVSTORE_NODE_SERVICE_HOST", "KVSTORE_NODE_SERVICE_PORT", "KVSTORE_NODE_SERVICE_PORT_FRAMES", "KVSTORE_NODE_PORT"),
        *("KVSTORE_NODE_PORT_7450_TCP", "KVSTORE_NODE_PORT_7450_TCP_ADDR", "KVSTORE_NODE_PORT_7450_TCP_PROTO"),
    ],
)
def test_what_kubernetes_says_of_its_services_is_left_alone(variable: str) -> None:
    """It puts these into every container of the name space: a Service called kvstore-node must not stop a node."""
    check(variable)
