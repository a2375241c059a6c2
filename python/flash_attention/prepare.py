"""RMS norm and rotary embedding of queries and keys before attention, in one kernel on a GPU, with gradients."""

from collections.abc import Sequence
from typing import Literal, NoReturn

import torch
from torch import Tensor

from flash_attention import _core
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.rows import angle_tensor, norm_of, numbers
from flash_attention.pytorch import ops as torch_ops


def prepare_qk(
    q: Tensor,
    k: Tensor,
    *,
    q_norm: Tensor | bool | None = None,
    k_norm: Tensor | bool | None = None,
    norm_eps: float = 1e-6,
    norm_plus_one: bool = False,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    rotary_offsets: Tensor | None = None,
    angle_positions: Tensor | None = None,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor]:
    """(q, k), normalised and rotated, for attention(). Without weights there is no norm, without cos and sin no rotation.

        cos, sin = rotary_tables(4096, q.shape[-1], 500000.0)
        q_weight, k_weight = torch.ones(q.shape[-1]), torch.ones(k.shape[-1])
        q, k = prepare_qk(q, k, q_norm=q_weight, k_norm=k_weight, cos=cos, sin=sin)
        out = attention(q, k, v, causal=True)

    Args:
        q, k: [batch, seq, heads, head_dim] (or as layout says), or with cu_seqlens [total, heads, head_dim]; any strides.
        q_norm, k_norm: [head_dim], the weights of an RMS norm of each row of a head; True: a norm without weights.
        norm_eps: added to the mean of the squares.
        norm_plus_one: the factor of a column is 1 + weight, as in Gemma.
        cos, sin: [positions, rotary_dim / 2], from rotary_tables(); the first rotary_dim columns are rotated.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
        rotary_offsets: int32 [batch]; the position of each sequence's first row. None: 0.
        angle_positions: int32 [batch, seq] or [total]; the position of every row of q and k. With sections
            [len(sections), batch, seq].
        sections: how many pairs each row of angle_positions rotates, as in multimodal models (M-RoPE).
        sections_interleaved: pair p belongs to section p mod len(sections), as long as that one has pairs left.
        cu_seqlens: int32 [batch + 1]; the beginning of each sequence. Rows of no sequence become 0.

    q, k and the weights have gradients. Their sums have a fixed order: the same call gives the same bits.
    """
    if wrong:
        refuse_keywords(prepare_qk, wrong)
    heads_first = layout == "bhsd" and cu_seqlens is None
    if heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    has_q_norm, q_weight = norm_of(q_norm)
    has_k_norm, k_weight = norm_of(k_norm)
    scalars = numbers(has_q_norm, has_k_norm, norm_plus_one, norm_eps, sections, sections_interleaved)
    tensors = (q, k, q_weight, k_weight, cos, sin, rotary_offsets, cu_seqlens, angle_tensor(angle_positions))
    q, k = torch.ops.flash_attention.prepare_qk(*tensors, interleaved, *scalars)
    return (q.transpose(1, 2), k.transpose(1, 2)) if heads_first else (q, k)


def _arguments(q, k, q_out, k_out, q_weight, k_weight, cos, sin, offsets, cu_seqlens, positions, interleaved, *scalars):
    """(tensors, scalars, stream) of _core.prepare."""
    places = (None, offsets, cu_seqlens, cu_seqlens, None, None, None, None, None)
    tensors = (k_out, None, k, None, q, q_out, cos, sin, *places, q_weight, k_weight, positions)
    given, stream = (tensors, 0) if torch_ops.HAS_EXCHANGE else torch_ops.detached(tensors)
    return given, (interleaved, False, "", *scalars), stream


def _prepare(q, k, *others):
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _core.prepare(*_arguments(q, k, q_out, k_out, *others))
    return q_out, k_out


def _prepare_backward(dq_out, dk_out, q, k, *others):
    q_weight, k_weight = others[:2]
    dq_out, dk_out = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq_out, dk_out))
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    sums = [None if w is None else torch.empty_like(w, dtype=torch.float32) for w in (q_weight, k_weight)]
    tensors, scalars, stream = _arguments(q, k, q, k, *others)
    gradients = dq_out, dk_out, dq, dk, *sums
    if not torch_ops.HAS_EXCHANGE:
        gradients = torch_ops.detached(gradients)[0]
    _core.prepare_backward(tensors, scalars, gradients, lambda size: torch_ops.workspace(q, size), stream)
    # The sum of a weight of another type is rounded; without a weight it is empty.
    pairs = zip((q_weight, k_weight), sums, strict=True)
    return dq, dk, *(q.new_empty(0) if weight is None else total.to(weight.dtype) for weight, total in pairs)


_INPUTS = (
    "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, Tensor? rotary_offsets, "
    "Tensor? cu_seqlens, Tensor? angle_positions, bool interleaved, bool q_norm, bool k_norm, bool norm_plus_one, "
    "float norm_eps, int[] sections, bool sections_interleaved"
)
torch_ops.library.define(f"prepare_qk({_INPUTS}) -> (Tensor, Tensor)")
torch_ops.library.define(
    f"prepare_qk_backward(Tensor dq_out, Tensor dk_out, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
for _key in ("CPU", "CUDA"):
    torch_ops.library.impl("prepare_qk", _prepare, _key)
    torch_ops.library.impl("prepare_qk_backward", _prepare_backward, _key)


def _fake_backward(dq_out, dk_out, q, k, q_weight, k_weight, *_):
    weights = (q.new_empty(0) if w is None else torch.empty_like(w) for w in (q_weight, k_weight))
    return torch.empty_like(q), torch.empty_like(k), *weights


torch.library.register_fake(
    "flash_attention::prepare_qk", lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)), lib=torch_ops.library
)
torch.library.register_fake("flash_attention::prepare_qk_backward", _fake_backward, lib=torch_ops.library)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:9])
    ctx.scalars = inputs[9:]


def _backward(ctx, dq_out, dk_out):
    tensors = ctx.saved_tensors
    dq, dk, dq_weight, dk_weight = torch.ops.flash_attention.prepare_qk_backward(dq_out, dk_out, *tensors, *ctx.scalars)
    weights = dq_weight if tensors[2] is not None else None, dk_weight if tensors[3] is not None else None
    return dq, dk, *weights, *[None] * 12


def _refuse(ctx, *_):
    raise NotImplementedError("prepare_qk: second derivatives are not computed")


torch.library.register_autograd("flash_attention::prepare_qk", _backward, setup_context=_save, lib=torch_ops.library)
torch.library.register_autograd("flash_attention::prepare_qk_backward", _refuse, lib=torch_ops.library)
