"""Which settings a device's UCX context gets: an operator's stay, and ports are said where UCX wants them."""

from pathlib import Path

import pytest

from kvstore.transfer.ucx import context


def test_what_the_operator_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(context.options("")) == {"TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"}
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "8k")
    assert context.options("eth0") == {"TCP_RX_SEG_SIZE": context.TCP_SEGMENT, "NET_DEVICES": "eth0"}


def test_an_infiniband_device_is_named_with_its_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for port in "12":
        (tmp_path / "mlx5_0" / "ports" / port).mkdir(parents=True)
    monkeypatch.setattr(context, "INFINIBAND", tmp_path)
    assert context.net_devices("mlx5_0") == "mlx5_0:1,mlx5_0:2"
    assert context.net_devices("eth0") == "eth0"
