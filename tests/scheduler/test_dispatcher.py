"""A dispatcher is what implements `dispatch`; it cannot be made without."""

import pytest

from kvstore.scheduler.dispatcher import Dispatcher


def test_a_dispatcher_must_decide() -> None:
    with pytest.raises(TypeError, match="dispatch"):
        Dispatcher()  # type: ignore[abstract]
