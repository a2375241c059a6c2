"""attention() with return_max_logit, return_key_mass or return_entropy: ops of their own, with gradients.

The ops take what forward and backward take. Gradients flow through out, lse, key mass and entropy; a largest score has
none.
"""

import torch

from flash_attention.arguments import names
from flash_attention.arguments.shapes import key_mass_shape, lse_shape, max_logit_shape
from flash_attention.options import NUM_TENSORS, Options, Tensors, made_deterministic, split
from flash_attention.pytorch import ops
from flash_attention.pytorch.gradients import refuse

_ASKED = "return_max_logit", "return_key_mass", "return_entropy"
_BIAS, _SINK = (Tensors._fields.index(name) for name in ("bias", "sink"))
_MAX_LOGIT, _KEY_MASS, _ENTROPY = (Options._fields.index(name) for name in _ASKED)


def run(tensors, options, seed, offset, return_lse):
    if torch.are_deterministic_algorithms_enabled():
        options = made_deterministic(options)
    out, lse, _, *statistics = torch.ops.flash_attention.forward_statistics(
        *tensors[:NUM_TENSORS], *options, seed, offset, names.as_text()
    )
    asked = options.return_max_logit, options.return_key_mass, options.return_entropy
    found = [values for values, on in zip(statistics, asked, strict=True) if on]
    return (out, lse, *found) if return_lse else (out, *found)


ops.library.define(
    f"forward_statistics({ops.TENSORS}, {ops.OPTIONS}, SymInt? seed, SymInt offset, {ops.NAMES}) -> (Tensor out, "
    "Tensor lse, Tensor rng_state, Tensor max_logit, Tensor key_mass, Tensor entropy)",
    tags=ops.TAGS,
)
ops.library.define(
    f"backward_statistics({ops.TENSORS}, {ops.OPTIONS}, Tensor out, Tensor lse, Tensor rng_state, Tensor? dout, "
    "Tensor? dlse, bool need_dbias, bool need_dsink, Tensor? entropy, Tensor? dkey_mass, Tensor? dentropy) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    tags=ops.EXACT_STRIDES,
)


def _empty(tensors, options):
    """max_logit, key_mass and entropy; without elements where they are not asked for: an op returns tensors only."""

    def make(shape, on):
        return tensors.q.new_empty(shape(tensors, options) if on else 0, dtype=torch.float32)

    return (
        make(max_logit_shape, options.return_max_logit),
        make(key_mass_shape, options.return_key_mass),
        make(lse_shape, options.return_entropy),
    )


def _asked(statistics, options):
    asked = options.return_max_logit, options.return_key_mass, options.return_entropy
    return tuple(values if on else None for values, on in zip(statistics, asked, strict=True))


def _forward(*arguments):
    tensors, options, (seed, offset, *of_caller) = split(arguments)
    statistics = _empty(tensors, options)
    with names.renamed_by(*of_caller):
        out, lse, rng_state = ops._forward(tensors, options, seed, offset, True, _asked(statistics, options))
    return out, lse, ops._no_rng_state(tensors.q) if rng_state is None else rng_state, *statistics


def _forward_fake(*arguments):
    tensors, options, _ = split(arguments)
    return *ops._forward_fake(*arguments), *_empty(tensors, options)


def _backward(*arguments):
    tensors, options, (*rest, entropy, dkey_mass, dentropy) = split(arguments)
    # The problem has the statistics through which a gradient flows.
    values = list(options)
    values[_MAX_LOGIT], values[_KEY_MASS], values[_ENTROPY] = False, dkey_mass is not None, dentropy is not None
    given = (
        None if dentropy is None else entropy.contiguous(),
        None if dkey_mass is None else dkey_mass.contiguous(),
        None if dentropy is None else dentropy.contiguous(),
    )
    return ops._stand_ins(tensors.q, ops._backward(tensors, Options(*values), *rest, given))


def _backward_fake(*arguments):
    return ops._backward_fake(*arguments[:-3])


for _key in ("CPU", "CUDA"):
    ops.library.impl("forward_statistics", _forward, _key)
    ops.library.impl("backward_statistics", _backward, _key)
torch.library.register_fake("flash_attention::forward_statistics", _forward_fake, lib=ops.library)
torch.library.register_fake("flash_attention::backward_statistics", _backward_fake, lib=ops.library)


def _save(ctx, inputs, output):
    tensors, options, _ = split(inputs)
    out, lse, rng_state, max_logit, _, entropy = output
    ctx.mark_non_differentiable(rng_state, max_logit)
    ctx.save_for_backward(*tensors[:NUM_TENSORS], out, lse, rng_state, entropy)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse, _, unused, dkey_mass, dentropy):
    *tensors, out, lse, rng_state, entropy = ctx.saved_tensors
    found = [None] * len(ctx.needs_input_grad)
    if dout is dlse is dkey_mass is dentropy is None:
        return tuple(found)
    needs = ctx.needs_input_grad[_BIAS], ctx.needs_input_grad[_SINK]
    dq, dk, dv, dbias, dsink = torch.ops.flash_attention.backward_statistics(
        *tensors, *ctx.options, out, lse, rng_state, dout, dlse, *needs, entropy,
        dkey_mass if ctx.options.return_key_mass else None, dentropy if ctx.options.return_entropy else None,
    )  # fmt: skip
    found[:3] = dq, dk, dv
    found[_BIAS], found[_SINK] = dbias if needs[0] else None, dsink if needs[1] else None
    return tuple(found)


torch.library.register_autograd("flash_attention::forward_statistics", _differentiate, setup_context=_save, lib=ops.library)
torch.library.register_autograd("flash_attention::backward_statistics", refuse, lib=ops.library)
