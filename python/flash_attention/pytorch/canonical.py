"""A call of torch tensors in the form that the kernels take: the one place that brings it there.

Eager calls that are in that form already never come here: _core.attention() reads them (binding/attention.cpp). All others
do, by whichever way they go on: eager code, torch's operations, programs, tensors of 8 bits.
"""

import torch

from flash_attention.arguments.names import refusal
from flash_attention.arguments.shapes import check_tensors, score_width
from flash_attention.options import Tensors

_NAMES = Tensors._fields
_AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def canonical(tensors, options):
    """Strided tensors of torch in one memory; q, k and v in autocast's type; bias, mask, slopes and sink as kernels read
    them."""
    check(tensors)
    try:
        tensors = Tensors(*in_autocast(*tensors[:3]), *tensors[3:])
        return tensors if is_plain(tensors) else _with_scores(tensors, options)
    except (AttributeError, IndexError):
        check_tensors(tensors)
        raise


def check(tensors):
    """Refuses what is no strided tensor of torch, and a mix of memory and of shapes alone."""
    q = tensors.q
    if tensors.k is None or tensors.v is None:
        raise refusal(TypeError, "k" if tensors.k is None else "v", "expected a tensor, got None")
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise refusal(TypeError, name, f"expected a tensor of torch, as {{q}} is, got {type(tensor).__name__}")
        if tensor.is_nested:
            raise refusal(
                TypeError, name, "got a nested tensor; attention_packed takes sequences end to end with cu_seqlens"
            )
        if tensor.layout is not torch.strided:
            raise refusal(TypeError, name, f"got layout {tensor.layout}; only torch.strided is allowed")
        if tensor.is_meta is not q.is_meta:
            raise refusal(ValueError, name, f"is on {tensor.device}; {{q}} is on {q.device}, and all must be on one device")


def is_plain(tensors):
    """Whether q, k and v are all that there is."""
    scores = tensors.bias is tensors.mask is tensors.alibi_slopes is tensors.sink is None
    lengths = tensors.cu_seqlens_q is tensors.seqused_q is tensors.seqused_kv is tensors.key_lengths is None
    lists = tensors.key_indices is tensors.key_blocks is tensors.key_counts is None
    return scores and lengths and lists and tensors.hidden_rows is tensors.block_mask is None


def in_autocast(q, k, v):
    """q, k and v in the type that autocast has for their device."""
    if not (is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type)):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(x.to(dtype) if getattr(x, "dtype", None) in _AUTOCAST_FROM else x for x in (q, k, v))


def with_rows(*tensors):
    """The same, copied if the last axis is not the innermost: for entrances that take any strides."""
    try:
        return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
    except RuntimeError:  # no strides: sparse or nested
        check(Tensors(*tensors[:3]))
        raise


def _with_scores(tensors, options):
    q, k, v, bias, mask, slopes, sink, *others = tensors
    if bias is mask is slopes is sink is None:
        return tensors
    if slopes is not None and torch.is_grad_enabled() and getattr(slopes, "requires_grad", False):
        refuse_gradient("alibi_slopes", "score - slope[h] * abs(i - j)")
    width = score_width(tensors, options)
    bias = None if bias is None else _scores(bias, width)
    mask = None if mask is None else _scores(mask, width)
    return Tensors(q, k, v, bias, mask, _single(slopes), _single(sink), *others)


def refuse_gradient(name, score_mod):
    """An argument without a gradient that asks for one: it would not learn, and no error would say so."""
    raise refusal(
        NotImplementedError,
        name,
        f"requires a gradient, which is not computed; detach() it, or write it as a score_mod, {score_mod}, whose tensors "
        "have gradients",
    )


def _single(values):
    return None if values is None else values.float().contiguous()


def _scores(scores, width):
    """A bias or mask as the kernels take it: last axis whole and of stride 1, size 1 where it broadcasts.

    An expanded axis is narrowed, so that its gradient is summed by the kernel and torch's expand adds nothing to it.
    """
    if scores.dim() == 0:
        return scores
    if scores.shape[-1] == 1 and width != 1:
        scores = scores.expand(*scores.shape[:-1], width)
    for axis in range(scores.dim() - 1):
        if scores.stride(axis) == 0 and scores.shape[axis] > 1:
            scores = scores.narrow(axis, 0, 1)
    return scores if scores.stride(-1) == 1 else scores.contiguous()
