"""The passes of a call with a program, and their place in torch's graph."""

import torch

from flash_attention import _core
from flash_attention.arguments.seeds import unsigned
from flash_attention.options import NUM_TENSORS, Tensors
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.gradients import refuse

_BIAS, _SINK = (Tensors._fields.index(name) for name in ("bias", "sink"))


def forward(program, tensors, captured, options, seed, offset, needed=()):
    """(out, lse, the dropout's seed and offset). `needed`: which arguments a backward pass will give gradients of."""
    seed = torch_ops.drawn(seed, options)
    out, lse = torch_ops.empty_results(tensors, options, True)
    tensors, stream = torch_ops.detached(tensors)
    try:
        _core.forward(
            tensors, options, out, lse, unsigned(seed), unsigned(offset), stream,
            lambda size: torch_ops.workspace(out, size), program.arguments(_detached(captured)),
            backward=_bits(needed[NUM_TENSORS:]) if any(needed) else None,
        )  # fmt: skip
    except ValueError as error:
        raise program.explain(error) from None
    return out, lse, (seed, offset)


def backward(program, tensors, captured, options, results, rng, dout, dlse, needed):
    """Gradients of the tensors and of what is captured, None where none is `needed`."""
    out, lse = results
    dout = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    need_dbias, need_dsink = needed[_BIAS], needed[_SINK]
    gradients = torch_ops._empty_gradients(tensors, need_dbias, need_dsink)
    of_captured = [
        torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device) if need else None
        for tensor, need in zip(captured, needed[NUM_TENSORS:], strict=True)
    ]
    tensors, stream = torch_ops.detached(tensors)
    _core.backward(
        tensors, options, (out.detach(), lse), (dout.detach(), dlse, *gradients),
        unsigned(rng[0]), unsigned(rng[1]), stream,
        lambda size: torch_ops.workspace(out, size), program.arguments(_detached(captured), of_captured),
    )  # fmt: skip
    dq, dk, dv, dbias, dsink = gradients
    of_captured = [None if g is None else g.to(tensor.dtype) for g, tensor in zip(of_captured, captured, strict=True)]
    return *Tensors(dq, dk, dv, bias=dbias, sink=dsink)[:NUM_TENSORS], *of_captured


def _bits(flags):
    return sum(1 << n for n, flag in enumerate(flags) if flag)


def _detached(tensors):
    return [tensor.detach() for tensor in tensors]


class ProgramAttention(torch.autograd.Function):
    """(out, lse), with gradients for q, k, v, bias, sink and the tensors that the program captures."""

    @staticmethod
    def forward(ctx, program, options, seed, offset, *tensors):
        given, captured = Tensors(*tensors[:NUM_TENSORS]), tensors[NUM_TENSORS:]
        out, lse, ctx.rng = forward(program, given, captured, options, seed, offset, ctx.needs_input_grad[4:])
        ctx.program, ctx.options = program, options
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        out, lse, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None, *(None,) * len(tensors)
        needed = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            found = _Gradients.apply(ctx.program, ctx.options, ctx.rng, needed, dout, dlse, out, lse, *tensors)
        else:
            found = _gradients(ctx.program, ctx.options, ctx.rng, needed, dout, dlse, out, lse, *tensors)
        return None, None, None, None, *found


def _gradients(program, options, rng, needed, dout, dlse, out, lse, *tensors):
    given, captured = Tensors(*tensors[:NUM_TENSORS]), tensors[NUM_TENSORS:]
    return backward(program, given, captured, options, (out, lse), rng, dout, dlse, needed)


class _Gradients(torch.autograd.Function):
    """The same where a graph of the gradients is wanted: second derivatives are refused, not dropped."""

    @staticmethod
    def forward(ctx, *arguments):
        return _gradients(*arguments)

    backward = staticmethod(refuse)
