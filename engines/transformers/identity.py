"""Which processes may read one another's blocks: all that changes the bytes of a model's cache, as a namespace.

The weights are told by a sample of each parameter: a fine-tuned model, a quantised one, or one with an adapter, merged or not, is another
model, whatever folder it was loaded from.
"""

import json
from typing import Any, Final

import torch
import transformers
import xxhash

from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument

SAMPLE_ELEMENTS: Final = 256
"""Of a parameter, evenly over it: some milliseconds for a model of a thousand parameters."""
NOT_OF_THE_CACHE: Final = frozenset({"_name_or_path", "_commit_hash", "architectures", "torch_dtype", "use_cache", "transformers_version"})
"""Entries of a configuration that change no byte of it, or that the namespace has elsewhere."""


def namespace_of(model: Any, dtype: torch.dtype, shapes: str, *, name: str, block_tokens: int) -> Namespace:
    """Of a model's blocks. `shapes` tells those of its layers; `name` is for people. Raises InvalidArgument: see `weights_id`."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in NOT_OF_THE_CACHE}
    return Namespace(
        model=name or type(model).__name__,
        revision=weights_id(model),
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        extra={
            "attention": str(model.config._attn_implementation),  # one rounds otherwise than another
            "config": _digest(json.dumps(config, sort_keys=True, default=str)),
            "engine": f"transformers {transformers.__version__}",
            "shapes": _digest(shapes),
        },
    )


def weights_id(model: Any) -> str:
    """A hash of the names, shapes, element types and samples of all parameters and buffers. Equal on every device.

    Raises InvalidArgument for parameters that are nowhere (on `meta`): what they will be cannot be known.
    """
    hasher = xxhash.xxh3_128()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise InvalidArgument(f"{name} is not loaded: a model that is off-loaded to the disk cannot be told from others")
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, len(flat) // SAMPLE_ELEMENTS)
        hasher.update(flat[::step][:SAMPLE_ELEMENTS].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
