"""The backward pass as a node of torch's graph, whose gradients are second derivatives, and what is not computed: it is
refused by name."""

import torch
from torch.autograd import forward_ad

from flash_attention.options import NUM_TENSORS, Tensors
from flash_attention.pytorch import derivatives
from flash_attention.pytorch import ops as torch_ops


def refuse(ctx, *unused):
    """The derivative of a backward pass that has none."""
    raise RuntimeError(
        "attention: second derivatives are not computed for this call; without programs, statistics, lists of keys and "
        "parallel sequences they are"
    )


def refuse_third(ctx, *unused):
    raise RuntimeError(
        "attention: third derivatives are not computed, nor forward mode over forward mode (jacfwd of jacfwd)"
    )


class Held:
    """Options as one argument of an autograd function: torch's rules for vmap would take a named tuple apart."""

    def __init__(self, options):
        self.options = options


# Places in an autograd function's arguments: q, k, v, options, seed, offset, *extras. The extras are the other tensors.
_BIAS, _SINK = (3 + Tensors._fields.index(name) for name in ("bias", "sink"))
_NOTHING = (None,) * NUM_TENSORS


def needed(ctx):
    """Whether bias and sink ask for gradients."""
    return ctx.needs_input_grad[_BIAS], ctx.needs_input_grad[_SINK]


def in_places(dq, dk, dv, dbias, dsink):
    """The gradients, each where its argument is."""
    found = [dq, dk, dv, *_NOTHING]
    found[_BIAS], found[_SINK] = dbias, dsink
    return tuple(found)


def _among_tensors(dq, dk, dv, dbias, dsink):
    """The same of arguments that are the tensors alone."""
    return Tensors(dq, dk, dv, bias=dbias, sink=dsink)[:NUM_TENSORS]


def _of_tensors(values):
    """The tensors that have gradients: q, k, v, bias and sink."""
    tensors = Tensors(*values)
    return [tensors.q, tensors.k, tensors.v, tensors.bias, tensors.sink]


def gradients(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink):
    """(dq, dk, dv, dbias or None, dsink or None), as torch_ops.backward() gives them."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # torch.compile has a refusal of its own
        results = out.detach(), lse.detach(), rng_state  # else their node would run, for gradients of nothing
        return Gradients.apply(Held(options), need_dbias, need_dsink, *results, dout, dlse, *tensors[:NUM_TENSORS])
    return torch_ops.backward(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink)


class Gradients(torch.autograd.Function):
    """torch_ops.backward() where a graph of the gradients is wanted: create_graph=True, or torch.func.

    Its derivatives are total: out and lse are functions of the other arguments, and have none of their own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(held, need_dbias, need_dsink, out, lse, rng_state, dout, dlse, *tensors):
        return torch_ops.backward(Tensors(*tensors), held.options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink)

    @staticmethod
    def setup_context(ctx, inputs, output):
        held, ctx.need_dbias, ctx.need_dsink, *saved = inputs
        ctx.options = held.options
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *tangents):
        out, lse, rng_state, dout, dlse, *tensors = ctx.saved_tensors
        nothing = (None,) * (8 + len(tensors))
        if all(given is None for given in tangents):
            return nothing
        found = _second(ctx, Tensors(*tensors), out, lse, rng_state, dout, dlse, tangents)
        of_dout = found[5] if dout is not None else None
        of_dlse = found[6] if dlse is not None else None
        return *nothing[:6], of_dout, of_dlse, *_among_tensors(*found[:5])

    @staticmethod
    def jvp(ctx, held, need_dbias, need_dsink, out_t, lse_t, rng_t, dout_t, dlse_t, *tangents):
        """A matrix of second derivatives is symmetric: its product with tangents is what backward() has."""
        out, lse, rng_state, dout, dlse, *tensors = ctx.saved_tensors
        tensors, tangents = Tensors(*tensors), _of_tensors(tangents)
        found = [None] * 5
        if any(given is not None for given in tangents):
            found = list(_second(ctx, tensors, out, lse, rng_state, dout, dlse, tangents)[:5])
        if dout_t is not None or dlse_t is not None:
            linear = gradients(tensors, ctx.options, out, lse, rng_state, dout_t, dlse_t, ctx.need_dbias, ctx.need_dsink)
            found = _added(found, linear)
        return tuple(found)


def _second(ctx, tensors, out, lse, rng_state, dout, dlse, tangents):
    if not computes(tensors):
        refuse(ctx)
    return second(ctx.options, ctx.need_dbias, ctx.need_dsink, (out, lse, rng_state), (dout, dlse), tangents, tensors)


def second(options, need_dbias, need_dsink, results, of_results, tangents, tensors):
    """derivatives.second() as a node of torch's graph, in which it is a function of the tangents alone."""
    given = [None if x is None else _EndOfDerivatives.apply(x) for x in (*of_results, *tensors[:NUM_TENSORS])]
    return Second.apply(Held(options), need_dbias, need_dsink, *results, *given[:2], *tangents, *given[2:])


class _EndOfDerivatives(torch.autograd.Function):
    """A tensor whose derivative is refused if, and only if, it is asked for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse_third)
    jvp = staticmethod(refuse_third)


def computes(tensors):
    """Whether there are passes for forward mode and second derivatives of such a call."""
    return tensors.key_indices is tensors.key_blocks is None


class Second(torch.autograd.Function):
    """derivatives.second(). It has gradients for the tangents, in which it is linear: torch's products with Hessians take
    them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(held, need_dbias, need_dsink, out, lse, rng_state, dout, dlse, *rest):
        tangents, tensors = rest[: derivatives.NUM_TANGENTS], Tensors(*rest[derivatives.NUM_TANGENTS :])
        return derivatives.second(tensors, held.options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink, tangents)

    @staticmethod
    def setup_context(ctx, inputs, output):
        held, ctx.need_dbias, ctx.need_dsink, *saved = inputs
        ctx.options = held.options
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *given):
        """The matrix of second derivatives is symmetric, and the tangent of the results is what backward turns round."""
        out, lse, rng_state, dout, dlse, *rest = ctx.saved_tensors
        tangents, tensors = rest[: derivatives.NUM_TANGENTS], Tensors(*rest[derivatives.NUM_TANGENTS :])
        of_gradients, of_results = given[:-2], given[-2:]
        found = [None] * derivatives.NUM_TANGENTS
        if any(x is not None for x in of_gradients):
            found = _second(ctx, tensors, out, lse, rng_state, dout, dlse, of_gradients)[: derivatives.NUM_TANGENTS]
        if any(x is not None for x in of_results):
            needs = tangents[3] is not None, tangents[4] is not None
            found = _added(found, gradients(tensors, ctx.options, out, lse, rng_state, *of_results, *needs))
        found = [None if tangent is None else x for tangent, x in zip(tangents, found, strict=True)]
        return *(None,) * 8, *found, *(None,) * NUM_TENSORS

    @staticmethod
    def jvp(ctx, held, need_dbias, need_dsink, out_t, lse_t, rng_t, dout_t, dlse_t, *rest):
        """Forward mode over the tangents. Tangents of the tensors themselves were refused before."""
        out, lse, rng_state, dout, dlse, *saved = ctx.saved_tensors
        tensors = Tensors(*saved[derivatives.NUM_TANGENTS :])
        return _second(ctx, tensors, out, lse, rng_state, dout, dlse, rest[: derivatives.NUM_TANGENTS])


def _added(*several):
    """Sums of results, of which some are None."""
    return [
        None if all(x is None for x in each) else sum(x for x in each if x is not None)
        for each in zip(*several, strict=True)
    ]


class Tangent(torch.autograd.Function):
    """derivatives.tangent(): (out, lse, out's tangent, lse's tangent), with gradients for tensors and tangents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(held, rng_state, *rest):
        tangents, tensors = rest[: derivatives.NUM_TANGENTS], Tensors(*rest[derivatives.NUM_TANGENTS :])
        return derivatives.tangent(tensors, held.options, rng_state, tangents)

    @staticmethod
    def setup_context(ctx, inputs, output):
        held, *saved = inputs
        ctx.options = held.options
        ctx.save_for_backward(*saved, *output[:2])
        ctx.save_for_forward(*saved, *output[:2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse, dout_t, dlse_t):
        rng_state, *rest, out, lse = ctx.saved_tensors
        tangents, tensors = rest[: derivatives.NUM_TANGENTS], Tensors(*rest[derivatives.NUM_TANGENTS :])
        first = 2 + derivatives.NUM_TANGENTS
        ctx.need_dbias = ctx.needs_input_grad[first + _BIAS - 3] or ctx.needs_input_grad[2 + 3]
        ctx.need_dsink = ctx.needs_input_grad[first + _SINK - 3] or ctx.needs_input_grad[2 + 4]

        def backward(of_out, of_lse):
            if of_out is None and of_lse is None:
                return [None] * 5
            return gradients(tensors, ctx.options, out, lse, rng_state, of_out, of_lse, ctx.need_dbias, ctx.need_dsink)

        found, of_tangents = backward(dout, dlse), backward(dout_t, dlse_t)
        if dout_t is not None or dlse_t is not None:
            found = _added(found, _second(ctx, tensors, out, lse, rng_state, dout_t, dlse_t, tangents)[:5])
        of_tangents = [None if given is None else x for given, x in zip(tangents, of_tangents, strict=True)]
        return None, None, *of_tangents, *_among_tensors(*found)

    jvp = staticmethod(refuse_third)


class ForwardOnly(torch.autograd.Function):
    """Results that require a gradient, as torch's do, and refuse it when it is computed, in both modes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name, num_results, *results_and_sources):
        return results_and_sources[:num_results]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *unused):
        raise RuntimeError(
            f"{ctx.name}: has no gradients, and the tensors it was given require them; attention() of float32, float16 and "
            "bfloat16 has, and torch.no_grad() or detach() says that none are wanted"
        )

    @staticmethod
    def jvp(ctx, *unused):
        raise NotImplementedError(
            f"{ctx.name}: forward-mode derivatives (jvp, jacfwd, hessian, dual tensors) are not computed; attention() of "
            "float32, float16 and bfloat16 has those of grad, vjp and jacrev"
        )


def refusing_gradients(name, found, *sources):
    """`found`, a result or a tuple of them, of a call without derivatives."""
    if torch.compiler.is_compiling():
        return found
    sources = [tensor for tensor in sources if isinstance(tensor, torch.Tensor)]
    if not (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        sources = [tensor for tensor in sources if tensor.requires_grad] if torch.is_grad_enabled() else []
    if not sources:
        return found
    results = found if isinstance(found, tuple) else (found,)
    results = ForwardOnly.apply(name, len(results), *results, *sources)
    return results if isinstance(found, tuple) else results[0]
