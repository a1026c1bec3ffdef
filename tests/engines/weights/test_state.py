"""Weights of a running engine, update by update."""

import pytest

from kvstore.engines.weights.identity import WeightsIdentity
from kvstore.engines.weights.state import WeightsState
from kvstore.protocol.errors import InvalidArgument

FILES = WeightsIdentity("sampled-1")


def test_state_starts_from_files() -> None:
    state = WeightsState(FILES)
    assert (state.identity, state.is_settled, state.generation) == (FILES, True, 0)


def test_state_reset_without_name_is_private() -> None:
    """Alike on ranks that know the nonce; each reset another."""
    ranks = [WeightsState(FILES), WeightsState(FILES)]
    for rank in ranks:
        rank.reset("engine-1")
    assert ranks[0].identity == ranks[1].identity
    assert ranks[0].identity.is_private
    assert not ranks[0].is_settled
    before = ranks[0].identity
    ranks[0].reset("engine-2")
    assert ranks[0].identity != before
    assert ranks[0].generation == 2
    ranks[0].resume()
    assert ranks[0].is_settled


def test_state_names_converge() -> None:
    """Engines with different histories share by the name alone, and go back to the files' identity."""
    first, second = WeightsState(FILES), WeightsState(FILES)
    first.reset("a")
    first.reset("b")
    first.name("step-1")
    second.begin_update()
    second.name("step-1")
    assert first.identity == second.identity == FILES.named("step-1")
    assert not second.is_settled
    second.resume()
    first.from_files(FILES)
    assert first.identity == FILES
    generation = second.generation
    second.name("step-1")
    assert second.generation == generation, "the same weights once more are no change"


def test_state_refused_name_changes_nothing() -> None:
    state = WeightsState(FILES)
    with pytest.raises(InvalidArgument):
        state.name("no name")
    assert (state.identity, state.generation) == (FILES, 0)


def test_state_resets_that_keep_weights() -> None:
    state = WeightsState(FILES, resets_keep_weights=True)
    state.reset("a")
    assert (state.identity, state.is_settled, state.generation) == (FILES, True, 0)


def test_state_files_changed_warns(caplog: pytest.LogCaptureFixture) -> None:
    state = WeightsState(FILES)
    state.files_changed("a")
    assert state.identity == FILES.private("a")
    assert "checkpoint changed on the disk" in caplog.text
