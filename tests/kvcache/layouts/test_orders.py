"""Orders of axes, by name and written out."""

import pytest

from kvstore.kvcache.layouts.orders import AXES, ORDERS, Order, parse_order
from kvstore.protocol.errors import InvalidArgument


def test_axes_before_the_bar_choose_a_region() -> None:
    assert parse_order("layer | kv block token head") == Order(("layer",), ("kv", "block", "token", "head"))
    assert parse_order(" block  layer kv head token") == Order((), ("block", "layer", "kv", "head", "token"))
    assert parse_order("| block layer kv head token") == Order((), ("block", "layer", "kv", "head", "token"))


def test_an_order_is_written_as_it_is_read() -> None:
    for text in (
        "layer kv | block token head",
        "block layer kv head token",
        "layer | block head kv token K^T",
        "block layer kv head token K^T V^T",
    ):
        assert str(parse_order(text)) == text


@pytest.mark.parametrize("name", ORDERS)
def test_every_name_is_an_order_whatever_its_case(name: str) -> None:
    order = parse_order(name)
    assert sorted(order.outer + order.inner) == sorted(AXES)
    assert parse_order(f" {name.swapcase()} ") == order
    assert parse_order(str(order)) == order


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nhd2",
        "block layer kv head",
        "block layer kv head token dim",
        "block block layer kv head token",
        "layer | kv | block token head",
        "K^T block layer kv head token",
        "block layer kv head token K^T K^T",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"must name each of the axes block, layer, kv, head, token once.*or be one of HND, NHD"):
        parse_order(text)


def test_transposed_orders_end_in_tokens() -> None:
    assert parse_order("vllm-cpu") == Order(("layer",), ("block", "head", "kv", "token"), ("K^T",))
    assert parse_order("block layer kv head token K^T V^T").transposed == ("K^T", "V^T")
    with pytest.raises(InvalidArgument, match="its last axis must be 'token'"):
        parse_order("block layer kv token head V^T")
