"""Sequences that begin alike: their common keys are read once for all of them, and the results are merged exactly."""

from typing import Any, NoReturn

from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.functional import attention
from flash_attention.merge import merge_states
from flash_attention.torch_cache import attention_over_cache


def shared_prefix_attention(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prefix_lengths: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool = True,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    **wrong: NoReturn,
) -> Any:
    """attention() of each sequence over the prefix of its group, then its own keys.

        out = shared_prefix_attention(q[:, :1], k[:1], v[:1], k, v)  # one prompt, two answers so far

    The queries of a group attend to its prefix as one sequence, so that it is read once for all of them; to their own
    keys each by itself; and merge_states() puts both together. Differentiable where there are no pages.

    Args:
        q: [batch, seq_q, heads_q, head_dim]; sequences of a group stand side by side.
        prefix_k, prefix_v: [groups, prefix, heads_kv, head_dim]; groups divides batch, and is 1 where all share one prefix.
        k, v: each sequence's own keys and values behind the prefix, [batch, seq_kv, heads_kv, head_dim]; with page_table
            pages, [num_pages, page_size, heads_kv, head_dim].
        prefix_lengths: int32 [groups]; keys of each prefix. All if None.
        seqused_kv: int32 [batch]; how many of its own keys a sequence has. All if None.
        page_table: int32 [batch, pages].
        causal: over the own keys, the last query sees the last key; the prefix is seen whole.
        softcap, sink, scale, return_lse: as in attention().
    """
    if wrong:
        refuse_keywords(shared_prefix_attention, wrong)
    batch, seq_q, heads, head_dim = _checked(q, prefix_k, prefix_v)
    groups = prefix_k.shape[0]
    options = {"softcap": softcap, "scale": scale, "return_lse": True}
    together = q.reshape(groups, batch // groups * seq_q, heads, head_dim)
    of_prefix, prefix_lse = attention(together, prefix_k, prefix_v, seqused_kv=prefix_lengths, **options)
    prefix_lse = prefix_lse.unflatten(-1, (-1, seq_q)).transpose(1, 2).reshape(batch, heads, seq_q)
    own = {"causal": causal, "sink": sink, "seqused_kv": seqused_kv, **options}
    if page_table is None:
        of_own, own_lse = attention(q, k, v, **own)
    else:
        of_own, own_lse = attention_over_cache(q, k, v, page_table=page_table, **own)
    out, lse = merge_states((of_prefix.reshape(of_own.shape), of_own), (prefix_lse, own_lse))
    return (out, lse) if return_lse else out


def _checked(q, prefix_k, prefix_v):
    for name, tensor in (("q", q), ("prefix_k", prefix_k), ("prefix_v", prefix_v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor of torch, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}; expected 4 axes, [batch or groups, seq, heads, head_dim]"
            )
    groups, batch = prefix_k.shape[0], q.shape[0]
    if groups < 1 or batch % groups:
        raise ValueError(f"prefix_k: has {groups} groups; allowed are those that divide the batch, {batch}")
    return q.shape
