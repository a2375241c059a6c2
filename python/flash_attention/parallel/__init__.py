"""Attention over sequences that do not fit one GPU, on torch.distributed.

    from flash_attention.parallel import context_attention, split
    q, k, v = (split(tensor, world, rank) for tensor in (q, k, v))        # rows of this rank, [batch, rows, heads, dim]
    out = context_attention(q, k, v, group, causal=True)                  # attention over the whole sequence

docs/parallel.md.
"""

from flash_attention.parallel.attention import context_attention
from flash_attention.parallel.heads import head_ranges
from flash_attention.parallel.hugging_face import parallelize_transformers
from flash_attention.parallel.layout import document_positions, join, pad_packed, positions, shift_labels, split
from flash_attention.parallel.peers import ParallelError
from flash_attention.parallel.planner import Links, Plan, plan
from flash_attention.parallel.torch_entry import register_context_parallel, unregister_context_parallel

__all__ = [
    "Links",
    "ParallelError",
    "Plan",
    "context_attention",
    "document_positions",
    "head_ranges",
    "join",
    "pad_packed",
    "parallelize_transformers",
    "plan",
    "positions",
    "register_context_parallel",
    "shift_labels",
    "split",
    "unregister_context_parallel",
]
