"""The passes of a call with a program, and their place in torch's graph.

A plain call has only q, k, v and the tensors that the program captures. It is one C function for each pass
(_core.program_forward, binding/eager_program.cpp). That function is passed the general function, too, and calls it if the
call is not plain.
"""

import torch

from flash_attention import _core
from flash_attention.arguments.seeds import unsigned
from flash_attention.options import NUM_TENSORS, Tensors
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.canonical import check
from flash_attention.pytorch.gradients import refuse

_BIAS, _SINK = (Tensors._fields.index(name) for name in ("bias", "sink"))
_NUM_ALONE = 3  # tensors of a call of q, k and v


def run(program, tensors, captured, options, seed, offset, need_lse):
    """(out, lse or None). `tensors`: q, k and v, or all NUM_TENSORS of a call."""
    if torch.is_grad_enabled():
        for tensor in (*tensors, *captured):
            if tensor is not None and tensor.requires_grad:
                program.check_gradients()
                return _apply(program, options, seed, offset, len(tensors), *tensors, *captured)
    return _forward(program, tensors, captured, options, seed, offset, need_lse, None)[:2]


def _forward(program, tensors, captured, options, seed, offset, need_lse, backward):
    """(out, lse, the dropout's seed and offset). `backward`: None, or which captured tensors a backward pass will give
    gradients of, as bits."""

    def general():
        return _general_forward(program, Tensors(*tensors), captured, options, seed, offset, need_lse, backward)

    try:
        if len(tensors) != _NUM_ALONE or options.dropout_p:
            return general()
        return _core.program_forward(
            *tensors, options, program.arguments(captured), need_lse, backward, _kept(program), general
        )
    except ValueError as error:
        raise program.explain(error) from None


def _general_forward(program, tensors, captured, options, seed, offset, need_lse, backward):
    check(tensors)
    seed = torch_ops.drawn(seed, options)
    out, lse = torch_ops.empty_results(tensors, options, need_lse)
    tensors, stream = (tensors, 0) if torch_ops.HAS_EXCHANGE else torch_ops.detached(tensors)
    _core.forward(
        tensors, options, out, lse, unsigned(seed), unsigned(offset), stream, lambda size: torch_ops.workspace(out, size),
        program.arguments(_detached(captured)), backward=backward, kept=_kept(program),
    )  # fmt: skip
    return out, lse, (seed, offset)


def _backward(program, options, rng, num_tensors, needed, dout, dlse, out, lse, *tensors):
    """Gradients of the tensors, q, k and v or all, and of what is captured; None where none is `needed`."""
    given, captured = tensors[:num_tensors], tensors[num_tensors:]
    dout = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    of_captured = [
        torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device) if need else None
        for tensor, need in zip(captured, needed[num_tensors:], strict=True)
    ]

    def general():
        return _general_backward(program, given, captured, options, (out, lse), rng, (dout, dlse), needed, of_captured)

    if num_tensors != _NUM_ALONE or options.dropout_p:
        found = general()
    else:
        arguments = program.arguments(captured, of_captured)
        found = _core.program_backward(*given, out, lse, dout, dlse, options, arguments, _kept(program), general)
    of_captured = [None if g is None else g.to(tensor.dtype) for g, tensor in zip(of_captured, captured, strict=True)]
    return *found, *of_captured


def _general_backward(program, given, captured, options, results, rng, of_results, needed, of_captured):
    tensors, (out, lse), (dout, dlse) = Tensors(*given), results, of_results
    everything = len(given) == NUM_TENSORS
    need_dbias, need_dsink = (everything and needed[_BIAS]), (everything and needed[_SINK])
    gradients = torch_ops._empty_gradients(tensors, need_dbias, need_dsink)
    tensors, stream = (tensors, 0) if torch_ops.HAS_EXCHANGE else torch_ops.detached(tensors)
    _core.backward(
        tensors, options, (out.detach(), lse), (dout.detach(), dlse, *gradients),
        unsigned(rng[0]), unsigned(rng[1]), stream,
        lambda size: torch_ops.workspace(out, size), program.arguments(_detached(captured), of_captured),
        kept=_kept(program),
    )  # fmt: skip
    dq, dk, dv, dbias, dsink = gradients
    return Tensors(dq, dk, dv, bias=dbias, sink=dsink)[: len(given)]


def _kept(program):
    """Where the call finds prepared masks. Not in a CUDA graph, which would go on with those of today."""
    kept = program.kept
    return None if kept is None or torch.cuda.is_current_stream_capturing() else kept


def _bits(flags):
    return sum(1 << n for n, flag in enumerate(flags) if flag)


def _detached(tensors):
    return [tensor.detach() for tensor in tensors]


class ProgramAttention(torch.autograd.Function):
    """(out, lse), with gradients for q, k, v, bias, sink and the tensors that the program captures."""

    @staticmethod
    def forward(ctx, program, options, seed, offset, num_tensors, *tensors):
        given, captured = tensors[:num_tensors], tensors[num_tensors:]
        backward = _bits(ctx.needs_input_grad[5 + num_tensors :])
        out, lse, ctx.rng = _forward(program, given, captured, options, seed, offset, True, backward)
        ctx.program, ctx.options, ctx.num_tensors = program, options, num_tensors
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        out, lse, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None, None, *(None,) * len(tensors)
        run = _Gradients.apply if torch.is_grad_enabled() else _backward
        needed = ctx.needs_input_grad[5:]
        found = run(ctx.program, ctx.options, ctx.rng, ctx.num_tensors, needed, dout, dlse, out, lse, *tensors)
        return None, None, None, None, None, *found


# Without the Python part of Function.apply, which serves torch.func: its transforms are refused before.
_apply = super(torch.autograd.Function, ProgramAttention).apply


class _Gradients(torch.autograd.Function):
    """The same where a graph of the gradients is wanted: second derivatives are refused, not dropped."""

    @staticmethod
    def forward(ctx, *arguments):
        return _backward(*arguments)

    backward = staticmethod(refuse)
