"""Element types have sizes, and a name that is none is answered with those there are."""

import re

import pytest

from kvstore.kvcache.models.dtypes import DTYPE_BYTES, dtype_bytes
from kvstore.protocol.errors import InvalidArgument


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_the_size_is_in_the_name(dtype: str) -> None:
    bits = re.search(r"\d+", dtype)
    assert bits is not None
    assert dtype_bytes(dtype) * 8 == int(bits[0])


@pytest.mark.parametrize("dtype", ["bf16", "", "Float16", None, ["float16"]])
def test_another_name_is_refused_with_those_there_are(dtype: str) -> None:
    with pytest.raises(InvalidArgument, match="take one of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2"):
        dtype_bytes(dtype)
