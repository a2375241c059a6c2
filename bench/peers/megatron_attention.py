"""Megatron-LM's core attention, written anew with its semantics: the scores are stored, hidden ones are filled with
-10000 before the softmax, which runs in fp32 and is rounded back.

    local   baddbmm, scale, mask, softmax, dropout, bmm: each its own operation
    fused   scale, mask and softmax in one kernel of ours (Triton), the rest as in local
"""

import torch

HIDDEN = -10000.0


def folded(tensor, heads):
    """[batch, seq, heads_kv, dim] -> [batch * heads, seq, dim], key-value heads repeated for their group."""
    tensor = tensor.repeat_interleave(heads // tensor.shape[2], dim=2) if tensor.shape[2] != heads else tensor
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3])


def attend(q, k, v, case, softmax):
    batch, seq_q, heads, head_dim = q.shape
    q, k, v = (folded(t, heads) for t in (q, k, v))
    buffer = torch.empty(q.shape[0], seq_q, k.shape[1], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(buffer, q, k.transpose(1, 2), beta=0.0, alpha=head_dim**-0.5)
    weights = softmax(scores, case.causal)
    if case.dropout_p:
        weights = torch.nn.functional.dropout(weights, case.dropout_p)
    return torch.bmm(weights, v).view(batch, heads, seq_q, -1).transpose(1, 2)


def separate_softmax(scores, causal):
    wide = scores.float()
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        wide = wide.masked_fill(hidden, HIDDEN)
    return torch.softmax(wide, dim=-1).to(scores.dtype)


def local(q, k, v, case):
    return attend(q, k, v, case, separate_softmax)


def fused(q, k, v, case):
    from peers.megatron_softmax import fused_softmax

    return attend(q, k, v, case, fused_softmax)
