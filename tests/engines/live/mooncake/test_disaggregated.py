"""SGLang's own prefill and decode over `mooncake.engine`, unmodified, on kvstore's transfer engine: the decode engine continues from KV
that the prefill engine wrote into its memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.live.environments import ROOT
from tests.engines.live.mooncake.package import install
from tests.engines.live.sglang.engines import Engine, prompt
from tests.ports import free_ports

HOST = "127.0.0.1"
ROOMS = [1, 2]


def test_decode_continues_from_kv_of_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of an engine that computed the prompts itself."""
    subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", tmp_path / "model", "tiny"], cwd=ROOT, check=True)
    monkeypatch.setenv("PYTHONPATH", install(tmp_path))
    for name, value in {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1", "SGLANG_HOST_IP": HOST}.items():
        monkeypatch.setenv(name, value)
    [port] = free_ports(1)
    plain: dict[str, Any] = {"enable_hierarchical_cache": False}
    apart = plain | {"disaggregation_transfer_backend": "mooncake", "disaggregation_bootstrap_port": port}
    bootstrap = {"bootstrap_host": [HOST] * 2, "bootstrap_port": [port] * 2, "bootstrap_room": ROOMS}
    asked = prompt(1), prompt(2)
    with (
        Engine(tmp_path / "model", **plain) as whole,
        Engine(tmp_path / "model", disaggregation_mode="prefill", **apart) as prefill,
        Engine(tmp_path / "model", disaggregation_mode="decode", **apart) as decode,
    ):
        prefill.begin(*asked, bootstrap=bootstrap)
        decoded = decode.generate(*asked, bootstrap=bootstrap)
        prefill.answers()
        assert [one.tokens for one in decoded] == [one.tokens for one in whole.generate(*asked)]
