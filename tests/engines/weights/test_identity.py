"""Names of weights: bases, versions, their limits, and what the settings choose.

Update by update they are in sglang/test_weights.py and vllm/test_variants.py.
"""

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engines.weights.files import find_checkpoint
from kvstore.engines.weights.identity import WeightsIdentity, identify
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError, InvalidArgument
from tests.engines.weights.checkpoints import write_checkpoint

LOG = logging.getLogger("test")


@given(st.text(max_size=2000), st.text(min_size=1, max_size=2000))
def test_identity_fits_a_namespace(base: str, version: str) -> None:
    """Every accepted version gives a valid namespace, which differs from that of its base."""
    files = WeightsIdentity(base)
    try:
        named = files.named(version)
    except InvalidArgument:
        return
    assert named.text != files.text
    assert Namespace(model="m", dtype="bfloat16", block_tokens=1, revision=named.text).revision == named.text
    assert named.private(version).text != named.text


def test_identity_texts() -> None:
    files = WeightsIdentity("sampled-1")
    assert files.text == "sampled-1"
    assert files.named("step-3").text == "sampled-1@step-3"
    assert files.named("step-3").named("step-4").text == "sampled-1@step-4"
    assert WeightsIdentity("").named("a").text == "@a"
    assert WeightsIdentity("x" * 600).text.startswith("~long-")
    assert files.named("v" * 300).text != files.named("v" * 301).text
    assert len(files.named("v" * 300).text) < 100


def test_identity_private_cannot_be_named() -> None:
    private = WeightsIdentity("b").private("nonce-1")
    assert private.is_private
    assert not WeightsIdentity("b").named("private-nonce-1").is_private
    with pytest.raises(InvalidArgument, match="not beginning with ~"):
        WeightsIdentity("b").named(private.version)


@pytest.mark.parametrize("version", ["", "a b", "a@b", "a\nb", "~a", "\ud800", "x" * 65_537])
def test_identity_refuses_versions(version: str) -> None:
    with pytest.raises(InvalidArgument, match="version"):
        WeightsIdentity("b").named(version)
    with pytest.raises(InvalidArgument, match="version"):
        WeightsIdentity("b").private(version)


def test_identify_by_bytes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    assert identify(folder, "sampled", log=LOG).text.startswith("sampled-")
    assert identify(str(folder), "full", hub_revision="main", log=LOG).text.startswith("full-")


def test_identify_by_revision_reads_nothing(tmp_path: Path) -> None:
    assert identify(tmp_path / "nowhere", "full", revision="mine", log=LOG).text == "mine"
    with pytest.raises(ConfigError, match="has an @"):
        identify(tmp_path, "full", revision="a@b", log=LOG)


def test_identify_by_name_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `off`, and where no file is found: then nothing is refused."""
    assert identify(write_checkpoint(tmp_path / "a"), "off", hub_revision="r1", log=LOG).text == "r1"
    (tmp_path / "b").mkdir()
    assert identify(tmp_path / "b", "sampled", log=LOG).text == ""
    assert find_checkpoint("org/model", hub_cache=tmp_path) is None
    assert identify("org/model", "sampled", hub_revision="r2", hub_cache=tmp_path, log=LOG).text == "r2"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "fingerprint is off" in caplog.messages[0]
    assert "found no weight files of org/model" in caplog.messages[2]


def test_identify_damaged_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model.safetensors has no safetensors header"):
        identify(tmp_path, "sampled", log=LOG)
