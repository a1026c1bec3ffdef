"""Weights of an engine as SGLang's calls change them, in the orders that trainers use."""

import logging

import pytest

from kvstore.engines.sglang.weights import CurrentWeights, EngineWeights, StartWeights
from kvstore.engines.weights.identity import WeightsIdentity
from kvstore.protocol.errors import ConfigError

FILES = WeightsIdentity("sampled-1")
LOG = logging.getLogger("test")


def identify(path: str) -> WeightsIdentity | None:
    if path == "damaged":
        raise ConfigError("truncated")
    return WeightsIdentity(f"sampled-{path}") if path != "by name" else None


def clean() -> bool:
    return True


def dirty() -> bool:
    return False


def engine(*, nonce: str = "n", draft: str = "") -> EngineWeights:
    weights = EngineWeights(LOG)
    weights.start(StartWeights(FILES, draft, nonce, identify))
    return weights


def text(weights: EngineWeights) -> str:
    assert weights.current is not None
    return weights.current.target.text


def test_weights_before_the_start_are_nobodys() -> None:
    assert EngineWeights(LOG).current is None
    weights = EngineWeights(LOG)
    weights.updated()
    weights.loaded("2")
    weights.recorded(None, clean)
    assert weights.current is None
    weights.start(StartWeights(FILES, "", "n", identify))
    assert weights.identity.is_private, "what they are now no file says"


def test_weights_of_the_files_at_the_start() -> None:
    assert engine(draft="d").current == CurrentWeights(FILES, "d", 0)


def test_update_from_disk_is_those_files() -> None:
    """A name that is given beside says nothing more; the draft's weights are read from there, too."""
    weights = engine(draft="d")
    weights.updated()
    assert weights.current is None
    weights.loaded("2")
    weights.recorded("step-1", dirty)
    assert weights.current is None, "pages of the old ones are in the engine"
    weights.flushed()
    assert weights.current is not None
    assert (weights.current.target.text, weights.current.draft) == ("sampled-2", "sampled-2")


@pytest.mark.parametrize("path", ["damaged", "by name"])
def test_update_from_files_without_fingerprint_goes_by_its_name(path: str) -> None:
    weights = engine()
    weights.updated()
    weights.loaded(path)
    weights.recorded("step-1", clean)
    assert text(weights) == "sampled-1@step-1"


def test_update_without_a_name_is_private() -> None:
    """Alike on ranks, of which one has a draft model to update besides; not on another engine."""
    ranks = [engine(), engine(draft="d"), engine(nonce="other")]
    for number, rank in enumerate(ranks):
        for _ in range(1 + number % 2):
            rank.updated()
        rank.recorded(None, clean)
    assert ranks[0].identity.is_private
    assert ranks[0].identity == ranks[1].identity != ranks[2].identity


def test_update_recorded_without_its_beginning_is_private() -> None:
    """On a rank that had nothing to load."""
    ranks = [engine(), engine()]
    ranks[0].updated()
    for rank in ranks:
        rank.recorded(None, clean)
    assert ranks[0].identity == ranks[1].identity
    assert ranks[0].identity.is_private


def test_update_that_failed_is_private_from_the_flush_on() -> None:
    weights = engine()
    weights.updated()
    assert weights.current is None
    weights.flushed()
    assert weights.identity.is_private
    assert weights.current is not None


def test_session_of_buckets_has_the_name_that_any_gave() -> None:
    weights = engine()
    weights.begin_session()
    for version in ("step-1", None):
        weights.updated()
        weights.recorded(version, clean)
        weights.flushed()
        assert weights.current is None, "more may follow"
    weights.end_session()
    assert text(weights) == "sampled-1@step-1"
    weights.begin_session()
    weights.updated()
    weights.recorded(None, clean)
    weights.end_session()
    assert weights.identity.is_private


def test_session_with_pages_left_needs_a_flush() -> None:
    weights = engine()
    weights.begin_session()
    weights.updated()
    weights.recorded("step-1", dirty)
    weights.end_session()
    assert weights.current is None
    weights.flushed()
    assert text(weights) == "sampled-1@step-1"


def test_weights_written_from_outside_are_named_afterwards() -> None:
    """A session without loads, then the name alone."""
    weights = engine()
    weights.begin_session()
    weights.end_session()
    assert weights.current is None
    weights.recorded("step-1", clean)
    assert text(weights) == "sampled-1@step-1"
    weights.recorded("step-1", dirty)
    assert text(weights) == "sampled-1@step-1", "that name is no news"
    weights.recorded("step-2", dirty)
    assert weights.current is None


def test_name_that_is_none_leaves_them_private(caplog: pytest.LogCaptureFixture) -> None:
    weights = engine()
    weights.updated()
    weights.recorded("no name", clean)
    assert weights.identity.is_private
    assert "stay a private version" in caplog.text


def test_flush_alone_changes_nothing() -> None:
    weights = engine()
    before = weights.current
    weights.flushed()
    assert weights.current is before


def test_clear_starts_a_version_of_its_own() -> None:
    weights = engine()
    weights.clear()
    first = text(weights)
    weights.clear()
    assert len({"sampled-1", first, text(weights)}) == 3
    weights.updated()
    weights.clear()
    assert weights.current is None
    weights.recorded("step-1", clean)
    assert text(weights) == "sampled-1@step-1"


def test_back_end_attached_again_keeps_what_was_updated() -> None:
    weights = engine()
    weights.start(StartWeights(WeightsIdentity("revision"), "", "n", identify))
    assert text(weights) == "revision"
    weights.updated()
    weights.recorded("step-1", clean)
    weights.start(StartWeights(FILES, "", "n", identify))
    assert text(weights) == "revision@step-1"
