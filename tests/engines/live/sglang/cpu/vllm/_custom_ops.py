"""Rotary position embedding in torch, under the name by which SGLang looks for it."""

import torch


def rotary_embedding(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, head_size: int, cos_sin_cache: torch.Tensor, is_neox: bool
) -> None:
    """Turns query and key [tokens, heads * head_size] in place. Pairs are (i, i + half) for NeoX, (2i, 2i + 1) else."""
    cos, sin = (part.unsqueeze(1) for part in cos_sin_cache.index_select(0, positions.flatten()).chunk(2, -1))
    rotary = 2 * cos.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(tensor.shape[0], -1, head_size)[..., :rotary]
        first, second = (heads[..., : rotary // 2], heads[..., rotary // 2 :]) if is_neox else (heads[..., 0::2], heads[..., 1::2])
        cosine, sine = cos.to(heads.dtype), sin.to(heads.dtype)
        turned = first * cosine - second * sine, second * cosine + first * sine
        first.copy_(turned[0])
        second.copy_(turned[1])
