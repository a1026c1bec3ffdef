"""int8, symmetric: codes from -127 to 127 and a float16 scale for each token of a record.

|decoded - value| <= scale / 2, where scale is the token's max|value| / 127 in float16, whose least step is 6e-8. A token
whose scale float16 cannot hold (a magnitude over 8.3 million) or that has a NaN or infinity decodes to NaN.
"""

from typing import Final

from kvstore.kvcache.codecs.scales import float16_inverse, float16_scale, is_finite, load, store
from kvstore.kvcache.codecs.torch_library import torch

_LEVELS: Final = 127


def encode(floats: torch.Tensor, records: torch.Tensor) -> None:
    """float32 [..., tokens, head_dim] to records; overwrites `floats`."""
    tokens, head_dim = floats.shape[-2:]
    scale = float16_scale(torch.maximum(floats.amax(-1, keepdim=True), -floats.amin(-1, keepdim=True)), _LEVELS)
    if not is_finite(scale):
        lost = ~scale.isfinite()
        scale.masked_fill_(lost, torch.nan)
        floats.masked_fill_(lost, 0.0)
    floats.mul_(float16_inverse(scale)).round_()
    records[..., : tokens * head_dim].view(torch.int8).unflatten(-1, (tokens, head_dim)).copy_(floats)
    store(records, tokens * head_dim, scale.squeeze(-1))


def decode(records: torch.Tensor, floats: torch.Tensor) -> None:
    """Records to float32 [..., tokens, head_dim]."""
    tokens, head_dim = floats.shape[-2:]
    floats.copy_(records[..., : tokens * head_dim].view(torch.int8).unflatten(-1, (tokens, head_dim)))
    floats.mul_(load(records, tokens * head_dim, tokens, torch.float16).float().unsqueeze(-1))
