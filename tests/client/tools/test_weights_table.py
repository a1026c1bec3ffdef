"""Promises of weights_table.py."""

import pytest
from rich.console import Console

from kvstore.client.tools.weights_table import age, shortened, state, weights_table, weights_text
from kvstore.protocol import control_pb2 as pb


def printed(*versions: pb.WeightsVersion, tenants: bool = False) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(weights_table(pb.WeightsTable(versions=versions), tenants=tenants))
    return captured.get()


def test_a_row_says_who_uses_a_version_and_since_when() -> None:
    one = pb.WeightsVersion(
        tenant="red", base="base", version="v1", adapter="lora", users=["a", "b"], is_used=True, used_age_s=7, namespaces=3, is_durable=True
    )
    text = printed(one)
    for part in ("base@v1", "lora", "in use", "7 s ago", "3", "a, b"):
        assert part in text
    assert "red" not in text
    assert "red" in printed(one, tenants=True)
    bare = printed(pb.WeightsVersion(), tenants=True)
    assert "(no base)" in bare
    assert "unused, private" in bare


def test_a_state_says_all_that_is_so() -> None:
    assert state(pb.WeightsVersion(is_durable=True)) == "unused"
    assert state(pb.WeightsVersion(is_used=True, is_retired=True)) == "in use, retired, private"


def test_a_long_base_is_shortened() -> None:
    assert shortened("b" * 48) == "b" * 48
    assert shortened("b" * 49) == "b" * 47 + "…"
    assert weights_text("", "v1") == "(no base)@v1"
    assert weights_text("base", "") == "base"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s ago"), (90, "2 min ago"), (7200, "2 h ago"), (3 * 86_400, "3 d ago")])
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text
