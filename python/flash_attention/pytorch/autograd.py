"""torch tensors: autocast, gradients, and the forms that the kernels take."""

import torch
from torch._guards import _TLS

from flash_attention import _core, routes
from flash_attention.arguments.names import refusal
from flash_attention.arguments.seeds import signed
from flash_attention.arguments.shapes import check_tensors, score_width
from flash_attention.options import NUM_TENSORS, Options, Tensors, has_statistics, made_deterministic
from flash_attention.pytorch import flops, op_autograd, statistics  # noqa: F401 (what ops have)
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.gradients import Held, gradients, in_places, needed
from flash_attention.pytorch.transforms import TransformedAttention, forward_mode, is_transformed

_NO_EXTRAS = (None,) * (NUM_TENSORS - 3)
_NAMES = Tensors._fields
_AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def run(tensors, options, seed, offset, return_lse):
    q = tensors.q
    if not isinstance(q, torch.Tensor) and torch.overrides.has_torch_function((q,)):  # a proxy of torch.fx
        arguments = tuple(tensors), tuple(options), seed, offset, return_lse
        return torch.overrides.handle_torch_function(_run_of_graph, (q,), *arguments)
    check(tensors)
    seed = None if seed is None else signed(seed)
    offset = signed(offset)
    extras = ()
    try:
        if is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            tensors = Tensors(*(_autocast(tensor, dtype) for tensor in tensors[:3]), *tensors[3:])
        if not is_plain(tensors):
            tensors = _as_taken(tensors, options)
            extras = tensors[3:NUM_TENSORS]
        q, k, v, bias, sink = tensors.q, tensors.k, tensors.v, tensors.bias, tensors.sink
        wants_gradient = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sink is not None and sink.requires_grad)
        )
    except (AttributeError, IndexError):
        check_tensors(tensors)
        raise
    if has_statistics(options):
        if is_transformed():
            raise NotImplementedError(
                "return_max_logit, return_key_mass, return_entropy: transforms of torch.func and forward-mode derivatives "
                "take none of them"
            )
        return statistics.run(tensors, options, seed, offset, return_lse)
    if is_transformed():
        found = forward_mode(tensors, options, seed, offset)
        out, lse = found or TransformedAttention.apply(q, k, v, Held(options), seed, offset, *(extras or _NO_EXTRAS))[:2]
    elif wants_gradient and (routes.is_tracing() or not torch._C._is_tracing()):
        if torch.are_deterministic_algorithms_enabled():
            options = made_deterministic(options)
        eager = not routes.is_tracing() and type(q) is routes.eager_type
        if not eager:  # torch.compile wants each tensor once
            v = v.view_as(v) if v is q or v is k else v
            k = k.view_as(k) if k is q else k
        out, lse = (_apply_attention if eager else Attention.apply)(q, k, v, options, seed, offset, *extras)
    else:  # or torch.jit.trace is at work: it records the op, which has gradients of its own
        out, lse, _ = torch_ops.forward(tensors, options, seed, offset, return_lse)
    return (out, lse) if return_lse else out


def _run_of_graph(tensors, options, seed, offset, return_lse):
    """run() as a node of torch.fx, which would make named tuples by nodes of their own."""
    return run(Tensors(*tensors), Options(*options), seed, offset, return_lse)


class Attention(torch.autograd.Function):
    """(out, lse) of a call, with gradients for q, k, v, bias and sink.

    `extras` are the tensors after q, k, v, in the order of the binding. If there are none, nothing is passed: torch looks
    at every argument in every call.
    """

    @staticmethod
    def forward(ctx, q, k, v, options, seed, offset, *extras):
        out, lse, rng_state = torch_ops.forward(Tensors(q, k, v, *extras), options, seed, offset, True)
        ctx.save_for_backward(q, k, v, out, lse, rng_state, *extras)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, rng_state, *extras = ctx.saved_tensors
        unused = (None,) * (3 + len(extras))
        if dout is None and dlse is None:
            return None, None, None, *unused
        needs = needed(ctx) if extras else (False, False)
        found = gradients(Tensors(q, k, v, *extras), ctx.options, out, lse, rng_state, dout, dlse, *needs)
        return in_places(*found) if extras else (*found[:3], *unused)


class PlainAttention(torch.autograd.Function):
    """out of a call in the kernels' form, from C to C: _core.attention() applies it.

    It is separate from Attention because torch looks at each argument and each result of a Function. Such a call takes
    6.4 us of the host; through general() and Attention it would take 27 (AMD EPYC, 8 tokens, one head of 16).
    """

    forward = staticmethod(_core.differentiable_forward)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        traced = routes.is_tracing() or torch.is_grad_enabled()
        return *(_plain_gradients if traced else _core.attention_backward)(q, k, v, out, lse, dout, ctx.options), None


def _plain_gradients(q, k, v, out, lse, dout, options):
    return gradients(Tensors(q, k, v), options, out, lse, None, dout, None, False, False)[:3]


def _apply_in_eager(function):
    """Function.apply without its Python part, which serves torch.func and takes a third of the time."""
    return super(torch.autograd.Function, function).apply


_apply_attention = _apply_in_eager(Attention)


def connect():
    """Tells the binding and routes.py what torch is: from then on eager calls are C functions."""
    routes.state_of_torch = _TLS
    _core.set_eager(
        tensor=torch.Tensor if torch_ops.HAS_EXCHANGE else torch._C.TensorBase,  # the C functions take no tensor
        empty_like=torch.empty_like,
        empty_strided=torch.empty_strided,
        float32=torch.float32,
        uint8=torch.uint8,
        grad_enabled=torch.is_grad_enabled,
        deterministic=torch._C._get_deterministic_algorithms,
        matmul_precision=torch.get_float32_matmul_precision,
        differentiate=_apply_in_eager(PlainAttention),
        general_backward=_plain_gradients,
        autocast=is_any_autocast_enabled,
        autocast_of_cuda=torch.is_autocast_enabled,
        dispatch_modes=torch._C._len_torch_dispatch_stack,
        interceptors=(
            torch._C._are_functorch_transforms_active,
            torch._C._is_tracing,
        ),
        forward_ad=vars(torch.autograd.forward_ad),
        profiler=vars(torch.autograd.profiler),
        options=Options,
    )
    routes.eager_type = torch.Tensor if torch_ops.HAS_EXCHANGE else None


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


def _autocast(tensor, dtype):
    return tensor.to(dtype) if getattr(tensor, "dtype", None) in _AUTOCAST_FROM else tensor


def _as_taken(tensors, options):
    """The tensors with bias, mask, slopes and sink as the kernels take them."""
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
