"""Accepted and rejected types of a copy's region."""

import numpy as np
import pytest

from kvstore.kvcache.layouts.copies import as_bytes
from kvstore.protocol.errors import InvalidArgument


def test_what_is_no_contiguous_buffer_is_refused() -> None:
    for region in (np.zeros((4, 4), np.uint8)[:, :2], memoryview(bytes(8))[::2], "text", None):
        with pytest.raises(InvalidArgument, match="contiguous buffer"):
            as_bytes(region)
