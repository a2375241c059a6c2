"""What the ops count for in torch.utils.flop_counter.FlopCounterMode: products of matrices, hidden scores included.

That is how torch counts its own attention: a multiplication and an addition for each of the two products of the forward
pass and the five of the backward pass, one of which repeats the scores.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from flash_attention import torch_ops


@register_flop_formula(torch.ops.flash_attention.forward, get_raw=True)
def forward_flops(*arguments, out_val=None, **unused):
    pairs, head_dim, head_dim_v = _sizes(arguments)
    return 2 * pairs * (head_dim + head_dim_v)


@register_flop_formula(torch.ops.flash_attention.backward, get_raw=True)
def backward_flops(*arguments, out_val=None, **unused):
    pairs, head_dim, head_dim_v = _sizes(arguments)
    return 2 * pairs * (3 * head_dim + 2 * head_dim_v)


def _sizes(arguments):
    """(scores over all heads and sequences, head_dim, head_dim_v)"""
    tensors, scalars, _ = torch_ops.split(arguments)
    q, k, v = tensors[:3]
    starts_q, starts_kv = tensors[7:9]
    if starts_q is None:
        heads, seq = (1, 2) if scalars[10] else (2, 1)
        pairs = q.shape[0] * q.shape[heads] * q.shape[seq] * k.shape[seq]
    elif isinstance(starts_q, torch._subclasses.FakeTensor) or starts_q.is_meta:  # lengths that nobody knows: the bounds
        pairs = (starts_q.shape[0] - 1) * q.shape[1] * (scalars[0] or q.shape[0]) * (scalars[1] or k.shape[0])
    else:
        pairs = q.shape[1] * int((starts_q.diff().long() * starts_kv.diff().long()).sum())
    return pairs, q.shape[-1], v.shape[-1]
