"""The library on torch tensors, by one of two routes; is_watched() chooses.

- Direct: eager code calls the binding. It buys time: a microsecond or two, without torch's dispatcher. A plain call is one
  C function from attention() to the launch (_core.attention, binding/attention.cpp).
- Traced: torch.compile, torch.export, modes and tensor subclasses get torch.ops.flash_attention.forward and .backward. It
  buys a node that torch can see, with shapes, strides and gradients of its own.
"""

import torch

from flash_attention import _core
from flash_attention.arguments import names
from flash_attention.arguments.seeds import unsigned
from flash_attention.arguments.shapes import check_tensors, lse_shape
from flash_attention.options import NUM_TENSORS, split

_KINDS = {
    "integer": "SymInt", "number": "float", "optional_number": "float?", "flag": "bool", "optional_flag": "bool?",
    "text": "str",
}  # fmt: skip
TENSORS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in _core.tensors[:NUM_TENSORS])
OPTIONS = ", ".join(f"{_KINDS[kind]} {name}" for name, kind, _ in _core.options)
NAMES = "str names=''"  # what the caller of the op calls its arguments: arguments/names.py

# torch 2.11 hands tensors over by a C table, with their stream; before that, by __dlpack__, which refuses requires_grad.
HAS_EXCHANGE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms_active = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing
_is_legacy_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)
_profiler = torch.autograd.profiler


def is_watched(tensor):
    """Whether torch must see the call itself: something traces or transforms, or there is no memory to compute on."""
    return (
        _is_compiling()
        or type(tensor) not in _PLAIN_TYPES
        or _num_dispatch_modes()
        or _transforms_active()
        or _is_tracing()
        or getattr(_profiler, "_is_profiler_enabled", False)  # it sees what is dispatched
        or not (tensor.is_cpu or tensor.is_cuda)
    )


def _is_batched(gradient):
    """Whether it is many at once, of torch.autograd.grad(is_grads_batched=True), which is no transform of torch.func."""
    return gradient is not None and _is_legacy_batched(gradient)


def forward(tensors, options, seed, offset, need_lse):
    """(out, lse or None, rng_state or None); rng_state is int64 [2], (seed, offset) of the dropout that was used."""
    if is_watched(tensors.q):
        return torch.ops.flash_attention.forward(*tensors[:NUM_TENSORS], *options, seed, offset, names.as_text())
    return _forward(tensors, options, seed, offset, need_lse)


def backward(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink):
    """(dq, dk, dv, dbias or None, dsink or None)."""
    if is_watched(out) or _is_batched(dout) or _is_batched(dlse):
        dq, dk, dv, dbias, dsink = torch.ops.flash_attention.backward(
            *tensors[:NUM_TENSORS], *options, out, lse, _no_rng_state(out) if rng_state is None else rng_state, dout, dlse,
            need_dbias, need_dsink,
        )  # fmt: skip
        return dq, dk, dv, dbias if need_dbias else None, dsink if need_dsink else None
    return _backward(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink)


def _forward(tensors, options, seed, offset, need_lse, statistics=None):
    seed = drawn(seed, options)
    out, lse = empty_results(tensors, options, need_lse)
    follows = 0 if need_lse and any(tensor.requires_grad for tensor in tensors[:3]) else None
    tensors, stream = (tensors, 0) if HAS_EXCHANGE else detached(tensors)
    _core.forward(
        tensors, options, out, lse, unsigned(seed), unsigned(offset), stream, lambda size: workspace(out, size),
        backward=follows, statistics=statistics,
    )  # fmt: skip
    return out, lse, torch.tensor((seed, offset), device="cpu") if options.dropout_p else None


def drawn(seed, options):
    """The seed of dropout; None: of torch's default generator, so that torch.manual_seed and checkpointing replay it."""
    if seed is not None:
        return seed
    return int(torch.randint(2**63 - 1, (), device="cpu")) if options.dropout_p else 0


def _backward(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink, statistics=None):
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    seed, offset = map(unsigned, rng_state.tolist()) if options.dropout_p else (0, 0)
    gradients = _empty_gradients(tensors, need_dbias, need_dsink)
    tensors, stream = (tensors, 0) if HAS_EXCHANGE else detached(tensors)
    results = (out, lse.contiguous())
    _core.backward(
        tensors, options, results, (dout, dlse, *gradients), seed, offset, stream, lambda size: workspace(out, size),
        statistics=statistics,
    )  # fmt: skip
    return gradients


def workspace(like, size):
    return torch.empty(size, dtype=torch.uint8, device=like.device)


def detached(tensors):
    """For a binding without torch's exchange table, which takes no tensor that requires a gradient: (tensors, stream)."""
    device = tensors[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kind = getattr(tensors, "_make", tuple)  # names are kept
    return kind(None if tensor is None else tensor.detach() for tensor in tensors), stream


def empty_results(tensors, options, need_lse, width=None):
    """out and lse, or None. width: of a row of out, if it is not that of v."""
    q, v = tensors.q, tensors.v
    try:
        width = v.shape[-1] if width is None else width
        if width == q.shape[-1]:
            out = torch.empty_like(q)
        elif options.heads_first:
            batch, heads, seq, _ = q.shape
            out = q.new_empty((batch, seq, heads, width)).transpose(1, 2)
        else:
            out = q.new_empty((*q.shape[:-1], width))
        return out, q.new_empty(lse_shape(tensors, options), dtype=torch.float32) if need_lse else None
    except (AttributeError, IndexError, ValueError):
        check_tensors(tensors)
        raise


def _empty_gradients(tensors, need_dbias, need_dsink):
    q, k, v, bias, sink = tensors.q, tensors.k, tensors.v, tensors.bias, tensors.sink
    make = torch.empty_like if q.shape[0] and k.shape[0] else torch.zeros_like  # an empty packed call writes no dbias
    dbias = make(bias, memory_format=torch.contiguous_format) if need_dbias else None
    dsink = make(sink, memory_format=torch.contiguous_format) if need_dsink else None
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dbias, dsink


library = torch.library.Library("flash_attention", "DEF")
TAGS = [torch.Tag.nondeterministic_seeded]
if hasattr(torch.Tag, "needs_exact_strides"):
    TAGS.append(torch.Tag.needs_exact_strides)
EXACT_STRIDES = TAGS[1:]
library.define(
    f"forward({TENSORS}, {OPTIONS}, SymInt? seed, SymInt offset, {NAMES}) -> (Tensor out, Tensor lse, Tensor rng_state)",
    tags=TAGS,
)
library.define(
    f"backward({TENSORS}, {OPTIONS}, Tensor out, Tensor lse, Tensor rng_state, Tensor? dout, Tensor? dlse, "
    "bool need_dbias, bool need_dsink) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    tags=EXACT_STRIDES,
)


def _forward_op(*arguments):
    tensors, options, (seed, offset, *of_caller) = split(arguments)
    with names.renamed_by(*of_caller):
        out, lse, rng_state = _forward(tensors, options, seed, offset, True)
    return out, lse, _no_rng_state(tensors.q) if rng_state is None else rng_state


def _forward_fake(*arguments):
    tensors, options, _ = split(arguments)
    rng_state = torch.empty(2, dtype=torch.int64, device="cpu") if options.dropout_p else _no_rng_state(tensors.q)
    return *empty_results(tensors, options, True), rng_state


def _no_rng_state(q):
    """Without dropout. On the device of q: a result on the host would keep the op out of CUDA graphs."""
    return q.new_empty(0, dtype=torch.int64)


def _backward_op(*arguments):
    tensors, options, rest = split(arguments)
    return _stand_ins(tensors.q, _backward(tensors, options, *rest))


def _backward_fake(*arguments):
    tensors, _, (*_, need_dbias, need_dsink) = split(arguments)
    return _stand_ins(tensors.q, _empty_gradients(tensors, need_dbias, need_dsink))


def _stand_ins(q, gradients):
    """An op returns tensors only: an empty one where there is no gradient."""
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in gradients)


for _key in ("CPU", "CUDA"):
    library.impl("forward", _forward_op, _key)
    library.impl("backward", _backward_op, _key)
torch.library.register_fake("flash_attention::forward", _forward_fake, lib=library)
torch.library.register_fake("flash_attention::backward", _backward_fake, lib=library)
