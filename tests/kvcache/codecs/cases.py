"""Schemes and tensors that the tests of the codecs share."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstore.kvcache.codecs.schemes import Scheme
from tests.kvcache.codecs import plain_codec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def floats(shape: tuple[int, ...], largest: float = 2.0**15) -> st.SearchStrategy[np.ndarray]:
    """Finite float32 numbers; equal ones are frequent."""
    elements = st.floats(-largest, largest, width=32)
    return hnp.arrays(np.float32, shape, elements=elements, fill=elements)


def plain_records(values: torch.Tensor, scheme: Scheme, *, is_key: bool) -> np.ndarray:
    """Return the oracle's records of values [..., heads, tokens, head_dim]."""
    tensors = values.float().numpy().reshape(-1, *values.shape[-3:])
    records = [np.frombuffer(record, np.uint8) for tensor in tensors for record in plain_codec.encode(tensor, scheme, is_key=is_key)]
    return np.stack(records).reshape(*values.shape[:-2], -1)


def plain_values(records: torch.Tensor, scheme: Scheme, *, is_key: bool, tokens: int, head_dim: int) -> np.ndarray:
    rows = records.reshape(-1, records.shape[-1]).numpy()
    values = [plain_codec.decode(row.tobytes(), scheme, is_key=is_key, tokens=tokens, head_dim=head_dim) for row in rows]
    return np.stack(values).reshape(*records.shape[:-1], tokens, head_dim)
