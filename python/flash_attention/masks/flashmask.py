"""PaddlePaddle's flashmask_attention: the same arguments, on torch tensors."""

from __future__ import annotations

from typing import Any, NoReturn

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.masks.intervals import LAST


def flashmask_attention(
    query: Any,
    key: Any,
    value: Any,
    startend_row_indices: Any = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Any = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: Any = None,
    **wrong: NoReturn,
) -> Any:
    """Attention with FlashMask's column-wise mask; paddle.nn.functional.flashmask_attention on torch tensors.

        rows = torch.full((1, 1, 16, 1), 12, dtype=torch.int32)  # no key is seen from query 12 on
        out = flashmask_attention(q, k, v, rows, causal=True)

    Args:
        query, key, value: [batch, seq, heads, head_dim].
        startend_row_indices: int32 [batch|1, heads_kv|1, seq_kv, 1|2|4]. Causal: a key is hidden from row r1 on, or from
            [r1, r2). Not causal: two numbers hide it from row r1 on and from rows before r2, four from [r1, r2) and
            [r3, r4).
        window_size: without startend_row_indices, keys to each side of the diagonal; an int or (left, right).
        return_softmax_lse: also return the log-sum-exp, float32 [batch, heads, seq_q].
        return_seed_offset: also return int64 [2], the seed and offset of dropout, for fixed_seed_offset.
        rng_name, name: accepted, without effect.
        block_mask: int32 [batch|1, heads_kv|1, blocks of queries, blocks of keys] of 128 x 128; 0 hides a block.
    """
    if wrong:
        refuse_keywords(flashmask_attention, wrong)
    import torch

    from flash_attention import functional

    if startend_row_indices is not None and window_size is not None:
        raise ValueError("window_size: got one together with startend_row_indices; allowed is one of them")
    left, right = window_size if isinstance(window_size, (tuple, list)) else (window_size, window_size)
    dropout = dropout if training else 0.0
    seed_offset = None
    if dropout:
        seed_offset = fixed_seed_offset
        if seed_offset is None:
            seed_offset = torch.tensor([int(torch.randint(2**62, (), device="cpu")), 0], device="cpu")
    seed, offset = (0, 0) if seed_offset is None else map(int, seed_offset)
    out, lse = functional.attention(
        query,
        key,
        value,
        causal=causal,
        window=(left, right),
        hidden_rows=_hidden_rows(startend_row_indices, causal),
        block_mask=_blocks(block_mask, query.shape[2] // key.shape[2]),
        dropout_p=dropout,
        seed=seed,
        offset=offset,
        scale=softmax_scale,
        return_lse=True,
    )
    results = [out]
    if return_softmax_lse:
        results.append(lse)
    if return_seed_offset:
        results.append(
            torch.zeros(2, dtype=torch.int64, device="cpu") if seed_offset is None else torch.as_tensor(seed_offset)
        )
    return tuple(results) if len(results) > 1 else out


def _hidden_rows(indices, causal):
    if indices is None:
        return None
    bounds = indices.shape[-1]
    allowed = (1, 2) if causal else (2, 4)
    if indices.dim() != 4 or bounds not in allowed:
        raise ValueError(
            f"startend_row_indices: got shape {list(indices.shape)} and causal={causal}; allowed are "
            f"[batch|1, heads_kv|1, seq_kv, {allowed[0]} or {allowed[1]}]"
        )
    if causal or bounds == 4:
        return indices.contiguous()
    import torch

    below, above = indices.unbind(-1)
    return torch.stack([below, torch.full_like(below, LAST), torch.zeros_like(above), above], dim=-1)


def _blocks(block_mask, group):
    if block_mask is None:
        return None
    from flash_attention.masks.blocks import BlockMask

    found = block_mask != 0
    if found.shape[1] > 1:  # of key heads
        found = found.repeat_interleave(group, dim=1)
    return BlockMask(found, (128, 128))
