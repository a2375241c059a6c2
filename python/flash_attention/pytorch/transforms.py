"""torch.func: grad, jvp, vmap and their compositions, and dual tensors."""

import torch
from torch.autograd import forward_ad

from flash_attention import _core
from flash_attention.options import NUM_OPTIONS, NUM_TENSORS, Tensors, split
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.derivatives import NUM_TANGENTS
from flash_attention.pytorch.gradients import Held, Tangent, computes, gradients, in_places, needed
from flash_attention.pytorch.tangents import check, tangents_of

_transforms_active = torch._C._are_functorch_transforms_active


def is_transformed():
    """Whether a transform of torch.func is at work, or a forward-mode derivative."""
    if torch.compiler.is_dynamo_compiling():
        if _transforms_active():
            # It sees no gradient inside of them, and would compile a call that has none.
            raise NotImplementedError("attention: torch.compile cannot take torch.func's transforms")
        return False
    return _transforms_active() or forward_ad._current_level >= 0


def forward_mode(tensors, options, seed, offset):
    """(out, lse) with their tangents, by one pass, where forward mode is the only transform; else None.

    TransformedAttention would compute out twice: its jvp() comes after its forward(). Where a graph is recorded, too, its
    backward pass may have tangents of its own, which this one's has not."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors[:NUM_TENSORS]):
        return None
    if options.kernel or options.standard or is_invariant(options):  # out is that kernel's, or has those bits
        return None
    if not computes(tensors) or not _is_forward_mode_alone():
        return None
    duals = [None if tensor is None else forward_ad.unpack_dual(tensor) for tensor in tensors[:NUM_TENSORS]]
    given = Tensors(*(None if dual is None else dual.tangent for dual in duals))
    tangents = given.q, given.k, given.v, given.bias, given.sink
    if all(tangent is None for tangent in tangents):
        return None
    check(given)
    rng_state = torch.tensor((torch_ops.drawn(seed, options), offset), device="cpu") if options.dropout_p else None
    primals = (None if dual is None else dual.primal for dual in duals)
    out, lse, out_t, lse_t = Tangent.apply(Held(options), rng_state, *tangents, *primals)
    return forward_ad.make_dual(out, out_t), forward_ad.make_dual(lse, lse_t)


def is_invariant(options):
    return _core.invariant_by_default() if options.invariant is None else options.invariant


def _is_forward_mode_alone():
    if not _transforms_active():
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return len(stack) == 1 and stack[0].key() == torch._C._functorch.TransformType.Jvp


class TransformedAttention(torch.autograd.Function):
    """(out, lse, rng_state or None), in the form that transforms take apart."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, held, seed, offset, *extras):
        return torch_ops.forward(Tensors(q, k, v, *extras), held.options, seed, offset, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, held, _, _, *extras = inputs
        rng_state = output[2]
        if rng_state is not None:
            ctx.mark_non_differentiable(rng_state)
        ctx.save_for_backward(q, k, v, *output, *extras)
        ctx.save_for_forward(q, k, v, *output, *extras)
        ctx.options = held.options
        ctx.set_materialize_grads(False)  # a tangent of zeros would be one

    @staticmethod
    def backward(ctx, dout, dlse, _):
        q, k, v, out, lse, rng_state, *extras = ctx.saved_tensors
        need_dbias, need_dsink = needed(ctx)
        found = gradients(Tensors(q, k, v, *extras), ctx.options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink)
        return in_places(*found)

    @staticmethod
    def jvp(ctx, q_t, k_t, v_t, held, seed, offset, *extras_t):
        q, k, v, out, lse, rng_state, *extras = ctx.saved_tensors
        tensors, given = Tensors(q, k, v, *extras), Tensors(q_t, k_t, v_t, *extras_t)
        if not computes(tensors):
            return *tangents_of(tensors, ctx.options, out, lse, given), None
        check(given)
        tangents = given.q, given.k, given.v, given.bias, given.sink
        _, _, out_t, lse_t = Tangent.apply(Held(ctx.options), rng_state, *tangents, *tensors[:NUM_TENSORS])
        return out_t, lse_t, None


def _forward_over(info, in_dims, *arguments):
    tensors, options, (seed, offset, *of_caller) = split(arguments)
    dims = Tensors(*in_dims[:NUM_TENSORS])
    op = torch.ops.flash_attention.forward
    dropout_p = options.dropout_p
    if not dropout_p and _folds(tensors, dims):
        out, lse, rng_state = op(*_fold(tensors, dims, info.batch_size), *options, seed, offset, *of_caller)
        return (_unfold(out, info), _unfold(lse, info), rng_state), (0, 0, None)
    if dropout_p and seed is None:
        if info.randomness == "error":
            raise RuntimeError('vmap: dropout_p needs randomness="same" or randomness="different"')
        if info.randomness == "same":
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    return _one_by_one(
        info, dims[:NUM_TENSORS], tensors[:NUM_TENSORS], lambda slices: op(*slices, *options, seed, offset, *of_caller)
    )


def _backward_over(info, in_dims, *arguments):
    tensors, options, rest = split(arguments)
    *results, need_dbias, need_dsink = rest
    dims = Tensors(*in_dims[:NUM_TENSORS])
    dims_of_results = in_dims[NUM_TENSORS + NUM_OPTIONS :][: len(results)]
    op = torch.ops.flash_attention.backward
    if not options.dropout_p and not need_dbias and not need_dsink and _folds(tensors, dims):
        rest = [_fold_batch(*pair, info.batch_size) for pair in zip(results, dims_of_results, strict=True)]
        rest[2] = results[2]  # no state: without dropout it is empty
        gradients = op(*_fold(tensors, dims, info.batch_size), *options, *rest, False, False)
        return (*(_unfold(gradient, info) for gradient in gradients[:3]), *gradients[3:]), (0, 0, 0, None, None)

    def call(slices):
        return op(*slices[:NUM_TENSORS], *options, *slices[NUM_TENSORS:], need_dbias, need_dsink)

    return _one_by_one(info, (*dims[:NUM_TENSORS], *dims_of_results), (*tensors[:NUM_TENSORS], *results), call)


def _tangent_over(info, in_dims, *arguments):
    tensors, options, (rng_state, *tangents) = split(arguments)
    dims, dims_t = Tensors(*in_dims[:NUM_TENSORS]), in_dims[-NUM_TANGENTS:]
    op = torch.ops.flash_attention.tangent
    if not options.dropout_p and _folds(tensors, dims) and tangents[3] is None and dims_t[4] is None:
        tangents = _fold_tangents(tangents, dims_t, info.batch_size)
        found = op(*_fold(tensors, dims, info.batch_size), *options, rng_state, *tangents)
        return tuple(_unfold(result, info) for result in found), (0,) * len(found)

    def call(slices):
        return op(*slices[:NUM_TENSORS], *options, *slices[NUM_TENSORS:])

    rest = rng_state, *tangents
    return _one_by_one(info, (*dims, *in_dims[-len(rest) :]), (*tensors[:NUM_TENSORS], *rest), call)


def _second_over(info, in_dims, *arguments):
    tensors, options, rest = split(arguments)
    *results, need_dbias, need_dsink = rest[:-NUM_TANGENTS]
    tangents = rest[-NUM_TANGENTS:]
    dims, dims_t = Tensors(*in_dims[:NUM_TENSORS]), in_dims[-NUM_TANGENTS:]
    dims_of_results = in_dims[NUM_TENSORS + NUM_OPTIONS :][: len(results)]
    op = torch.ops.flash_attention.second
    alone = tangents[3] is None and dims_t[4] is None and not need_dbias and not need_dsink
    if not options.dropout_p and alone and _folds(tensors, dims):
        folded = [_fold_batch(*pair, info.batch_size) for pair in zip(results, dims_of_results, strict=True)]
        folded[2] = results[2]  # no state: without dropout it is empty
        tangents = _fold_tangents(tangents, dims_t, info.batch_size)
        found = op(*_fold(tensors, dims, info.batch_size), *options, *folded, False, False, *tangents)
        dq, dk, dv, dbias, dsink, out_t, lse_t = found
        batched = [_unfold(result, info) for result in (dq, dk, dv, out_t, lse_t)]
        return (*batched[:3], dbias, dsink, *batched[3:]), (0, 0, 0, None, None, 0, 0)

    def call(slices):
        of_results = slices[NUM_TENSORS : NUM_TENSORS + len(results)]
        return op(
            *slices[:NUM_TENSORS], *options, *of_results, need_dbias, need_dsink, *slices[NUM_TENSORS + len(results) :]
        )

    everything = *tensors[:NUM_TENSORS], *results, *tangents
    return _one_by_one(info, (*dims, *dims_of_results, *dims_t), everything, call)


def _fold_tangents(tangents, dims, size):
    """Folds the tangents of q, k and v. A bias has none, and the sink has one for all slices."""
    return *(_fold_batch(*pair, size) for pair in zip(tangents[:3], dims[:3], strict=True)), None, tangents[4]


def _folds(tensors, dims):
    """Whether the axis can join the batch: no packed call, one sink for all, no masks of intervals or blocks, no lists."""
    masks = tensors.hidden_rows is tensors.block_mask is tensors.key_indices is tensors.key_blocks is None
    return masks and tensors.cu_seqlens_q is dims.sink is None


def _fold(tensors, dims, size):
    def fold(name):
        return _fold_batch(getattr(tensors, name), getattr(dims, name), size)

    q, slopes = fold("q"), tensors.alibi_slopes
    batch = q.shape[0] // size
    if slopes is not None:
        logical = slopes.dim() - (dims.alibi_slopes is not None)
        slopes = _in_front(slopes, dims.alibi_slopes, size)
        slopes = slopes.unsqueeze(1).expand(-1, batch, -1) if logical == 1 else slopes
        slopes = slopes.flatten(0, 1)
    folded = Tensors(
        q,
        fold("k"),
        fold("v"),
        bias=_fold_scores(tensors.bias, dims.bias, size, batch),
        mask=_fold_scores(tensors.mask, dims.mask, size, batch),
        alibi_slopes=slopes,
        sink=tensors.sink,
        seqused_q=fold("seqused_q"),
        seqused_kv=fold("seqused_kv"),
        key_lengths=fold("key_lengths"),
    )
    return folded[:NUM_TENSORS]


def _in_front(tensor, dim, size):
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _fold_batch(tensor, dim, size):
    return None if tensor is None else _in_front(tensor, dim, size).flatten(0, 1)


def _fold_scores(scores, dim, size, batch):
    """A bias or mask, whose leading axes may be missing or of size 1."""
    if scores is None or (dim is None and (scores.dim() < 4 or scores.shape[0] == 1)):
        return scores
    scores = _in_front(scores, dim, size)
    missing = 5 - scores.dim()
    scores = scores.reshape(size, *(1,) * missing, *scores.shape[1:])
    return scores.expand(-1, batch, -1, -1, -1).flatten(0, 1)


def _unfold(tensor, info):
    return (
        tensor.unflatten(0, (info.batch_size, -1))
        if tensor.shape[0]
        else tensor.unsqueeze(0).expand(info.batch_size, *tensor.shape)
    )


def _one_by_one(info, dims, tensors, call):
    slices = [
        [tensor if dim is None else tensor.select(dim, i) for tensor, dim in zip(tensors, dims, strict=True)]
        for i in range(info.batch_size)
    ]
    results = [torch.stack(column) for column in zip(*map(call, slices), strict=True)]
    return tuple(results), (0,) * len(results)


torch.library.register_vmap("flash_attention::forward", _forward_over, lib=torch_ops.library)
torch.library.register_vmap("flash_attention::backward", _backward_over, lib=torch_ops.library)
torch.library.register_vmap("flash_attention::tangent", _tangent_over, lib=torch_ops.library)
torch.library.register_vmap("flash_attention::second", _second_over, lib=torch_ops.library)
