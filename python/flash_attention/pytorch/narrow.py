"""Attention on torch tensors of 8 bits: q, k and v in float8, out in 16 or 32. Forward only.

As pytorch.ops: eager code calls the binding, whatever traces goes through torch.ops.flash_attention.forward_narrow.
"""

import torch

from flash_attention import _core
from flash_attention.arguments import names
from flash_attention.arguments.seeds import signed, unsigned
from flash_attention.arguments.shapes import lse_shape
from flash_attention.options import NUM_TENSORS, Tensors, split
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.canonical import canonical
from flash_attention.pytorch.gradients import refusing_gradients

FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}
_OUT = (torch.bfloat16, torch.float16, torch.float32)
_NARROW = (
    "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, str codes, ScalarType out_dtype, SymInt? seed=None, "
    f"SymInt offset=0, {torch_ops.NAMES}"
)
_NUM_NARROW = 7


def run(tensors, options, seed, offset, return_lse, q_descale, k_descale, v_descale, out_dtype):
    """attention() or attention_packed() of float8 tensors; each is worth code * descale."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if not isinstance(q, torch.Tensor) or q.dtype not in FLOAT8:
        got = q.dtype if isinstance(q, torch.Tensor) else type(q).__name__
        raise TypeError(f"q: got {got}; descales and out_dtype go with torch tensors of float8_e4m3fn or float8_e5m2")
    for name, tensor in (("k", k), ("v", v)):
        if getattr(tensor, "dtype", None) != q.dtype:
            raise TypeError(
                f"{name}: got {getattr(tensor, 'dtype', type(tensor).__name__)}; expected the dtype of q, {q.dtype}"
            )
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if out_dtype not in _OUT:
        raise TypeError(f"out_dtype: got {out_dtype}; allowed are torch.bfloat16, torch.float16 and torch.float32")
    if options.standard:
        raise ValueError('kernel: the textbook algorithm, "standard", takes no 8-bit tensors')
    scales = _descales(tensors, options, q_descale, k_descale, v_descale)
    codes = FLOAT8[q.dtype]
    tensors = canonical(tensors, options)
    sources = (*tensors[:3], tensors.bias, tensors.sink, *scales)
    seed, offset = None if seed is None else signed(seed), signed(offset)
    tensors = Tensors(*(tensor.view(torch.uint8) for tensor in (q, k, v)), *tensors[3:])
    if torch_ops.is_watched(q):
        out, lse = torch.ops.flash_attention.forward_narrow(
            *tensors[:NUM_TENSORS], *options, *scales, codes, out_dtype, seed, offset, names.as_text()
        )
    else:
        out, lse = _forward(tensors, options, return_lse, *scales, codes, out_dtype, seed, offset)
    return refusing_gradients("attention of float8 tensors", (out, lse) if return_lse else out, *sources)


def _descales(tensors, options, *given):
    """The scales of q, k and v, float32 [1] or [batch, heads_kv], all of one shape; three times None if none was given."""
    if all(scale is None for scale in given):
        return None, None, None
    q, k, starts = tensors.q, tensors.k, tensors.cu_seqlens_q
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    shape = (batch, k.shape[1 if options.heads_first and starts is None else k.dim() - 2])
    scales = []
    for name, scale in zip(("q_descale", "k_descale", "v_descale"), given, strict=True):
        scale = 1.0 if scale is None else scale
        if isinstance(scale, (int, float)):
            scale = torch.full((1,), float(scale), dtype=torch.float32, device=q.device)
        if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
            got = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
            raise TypeError(f"{name}: got {got}; expected a number or a float32 tensor")
        if scale.device != q.device:
            raise ValueError(f"{name}: is on {scale.device}; expected {q.device}, where q is")
        if scale.numel() != 1 and tuple(scale.shape) != shape:
            raise ValueError(
                f"{name}: got shape {list(scale.shape)}; expected one number or {list(shape)}, (batch, heads_kv)"
            )
        if not scale.is_cuda and not torch_ops.is_watched(scale) and not (torch.isfinite(scale) & (scale > 0)).all():
            raise ValueError(f"{name}: got {scale.tolist()}; allowed are positive finite numbers")
        scales.append(scale)
    if all(scale.numel() == 1 for scale in scales):
        return tuple(scale.reshape(1) for scale in scales)
    return tuple(scale.reshape(1, 1).expand(shape) if scale.numel() == 1 else scale for scale in scales)


def _empty_results(tensors, options, out_dtype, need_lse):
    q, v = tensors.q, tensors.v
    width = v.shape[-1]
    if options.heads_first and tensors.cu_seqlens_q is None:
        batch, heads, seq, _ = q.shape
        out = q.new_empty((batch, seq, heads, width), dtype=out_dtype).transpose(1, 2)
    else:
        out = q.new_empty((*q.shape[:-1], width), dtype=out_dtype)
    return out, q.new_empty(lse_shape(tensors, options), dtype=torch.float32) if need_lse else None


def _forward(tensors, options, need_lse, q_scale, k_scale, v_scale, codes, out_dtype, seed=None, offset=0):
    seed = unsigned(torch_ops.drawn(seed, options))
    out, lse = _empty_results(tensors, options, out_dtype, need_lse)
    tensors = tensors._replace(k_scale=k_scale, v_scale=v_scale, q_scale=q_scale)
    tensors, stream = (tensors, 0) if torch_ops.HAS_EXCHANGE else torch_ops.detached(tensors)
    make = lambda size: torch_ops.workspace(out, size)  # noqa: E731
    _core.forward(tensors, options, out, lse, seed, unsigned(offset), stream, make, codes=codes)
    return out, lse


torch_ops.library.define(
    f"forward_narrow({torch_ops.TENSORS}, {torch_ops.OPTIONS}, {_NARROW}) -> (Tensor out, Tensor lse)",
    tags=torch_ops.TAGS,
)


def _forward_op(*arguments):
    tensors, options, narrow = split(arguments)
    narrow, of_caller = narrow[:_NUM_NARROW], narrow[_NUM_NARROW:]
    with names.renamed_by(*of_caller):
        return _forward(tensors, options, True, *narrow)


def _forward_fake(*arguments):
    tensors, options, narrow = split(arguments)
    return _empty_results(tensors, options, narrow[4], True)  # out_dtype


for _key in ("CPU", "CUDA"):
    torch_ops.library.impl("forward_narrow", _forward_op, _key)
torch.library.register_fake("flash_attention::forward_narrow", _forward_fake, lib=torch_ops.library)
