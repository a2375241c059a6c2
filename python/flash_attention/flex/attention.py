"""flex_attention: torch's signature, with the scores as a program of this library."""

import operator
import sys

import torch

from flash_attention import routes
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.options import make_options
from flash_attention.arguments.seeds import signed
from flash_attention.flex import passes
from flash_attention.flex.block_mask import check_sizes, kept_of, mask_mods_of
from flash_attention.flex.program import NoProgram, record
from flash_attention.flex.slopes import with_slopes
from flash_attention.options import NUM_TENSORS, Tensors, made_deterministic
from flash_attention.pytorch import autograd as torch_autograd
from flash_attention.pytorch.canonical import canonical, in_autocast, is_plain, with_rows
from flash_attention.pytorch.transforms import is_transformed
from flash_attention.pytorch.untraced import untraced
from flash_attention.tracing import is_tracing

is_tracing()  # at its first use it tells the binding what torch is
_AS_TORCH = {"alignment": "top_left", "layout": "bhsd"}
_OPTIONS = make_options(**_AS_TORCH)


@untraced
def flex_attention(
    query,
    key,
    value,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel_options=None,
    *,
    return_aux=None,
    **wrong,
):
    """softmax(score_mod(scale * q k^T) where mask_mod) v, forward and backward, on CPUs and GPUs.

        out = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - 0.1 * (i - j).abs())

    Args:
        query: [batch, heads_q, seq_q, head_dim]; key and value [batch, heads_kv, seq_kv, ...].
        score_mod: score_mod(score, b, h, i, j) -> a float, of torch's operations on tensors without axes. Tensors that it
            reads are captured, and those of floats get gradients; numbers that it captures are arguments of the kernel.
        block_mask: of create_block_mask, here or in torch.
        scale: 1 / sqrt(head_dim) if None.
        enable_gqa: whether heads_kv may be less than heads_q.
        return_lse: also return the logarithm of the sum of exponentials, float32 [batch, heads_q, seq_q].
        kernel_options: {"kernel": a name of kernels()}; torch's tuning options are accepted and change nothing.
        return_aux: torch's AuxRequest; lse alone.
    """
    if wrong:
        refuse_keywords(flex_attention, wrong)
    masks, kept = ([], None) if block_mask is None else (mask_mods_of(block_mask), kept_of(block_mask))
    of_query, of_key = query.shape, key.shape
    if len(of_query) == len(of_key) == 4:
        if of_query[1] != of_key[1] and not enable_gqa:
            raise ValueError(
                f"query has {of_query[1]} heads, key and value {of_key[1]}; set enable_gqa=True where they differ"
            )
        if of_key[0] == 1 < of_query[0] and value.dim() == 4 and value.shape[0] == 1:
            # One cache for all of the batch, as torch takes it.
            key, value = (tensor.expand(of_query[0], -1, -1, -1) for tensor in (key, value))
        if block_mask is not None:
            check_sizes(block_mask, of_query, of_key)
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise NotImplementedError("return_aux: max_scores is not computed; lse is")
    if return_aux is not None and return_lse:
        raise ValueError("return_lse: got True beside return_aux; allowed is one of the two")
    kernel = kernel_options and kernel_options.get("kernel")
    options = _OPTIONS if scale is None and not kernel else make_options(scale=scale, kernel=kernel or None, **_AS_TORCH)
    wants_lse = return_lse or return_aux is not None
    if score_mod is None and not masks:
        result = torch_autograd.run(Tensors(*with_rows(query, key, value)), options, 0, 0, wants_lse)
    else:
        result = run(Tensors(query, key, value), options, 0, 0, wants_lse, score_mod, masks, kept)
    if return_aux is None:
        return result
    out, lse = result
    given = sys.modules[type(return_aux).__module__]  # torch's, of whatever version made the request
    return out, given.AuxOutput(lse=lse if return_aux.lse else None)


@untraced
def run_program(tensors, options, seed, offset, return_lse, score_mod, mask_mod, kept=None):
    """attention() with a score_mod, a mask_mod or both; the other arguments are those of run()."""
    masks = [] if mask_mod is None else [mask_mod]
    return run(tensors, options, seed, offset, return_lse, score_mod, masks, kept)


def run_prepared(tensors, options, seed, offset, return_lse, kept):
    """attention() with masks that are data and kept. Nothing traces."""
    if not isinstance(tensors.q, torch.Tensor) or not tensors.q.is_cuda or is_transformed():
        return routes.run_of(tensors.q)(tensors, options, seed, offset, return_lse)
    return _attend(NoProgram(), tensors, options, seed, offset, return_lse, kept)


def run(tensors, options, seed, offset, return_lse, score_mod, mask_mods, kept):
    """A call of attention() with programs; `kept` is None or where prepared masks are (_core.KeptMasks), the other
    arguments are those of torch_autograd.run()."""
    if is_transformed():
        raise NotImplementedError("score_mod, mask_mod: transforms of torch.func and forward-mode derivatives take neither")
    program = record(score_mod, None, mask_mods)
    return _attend(program, tensors, options, seed, offset, return_lse, kept)


def _attend(program, tensors, options, seed, offset, return_lse, kept):
    q, k, v = tensors[:3]
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q: programs take tensors of torch, got {type(q).__name__}")
    plain = is_plain(tensors)
    if plain and type(q) is type(k) is type(v) is torch.Tensor:
        given = with_rows(*in_autocast(q, k, v))  # the passes make sure of the rest
    else:
        tensors = canonical(tensors, options)
        given = with_rows(*tensors[:3]) + ([] if plain else list(tensors[3:NUM_TENSORS]))
    if program.has_score and q.dim() > 2:
        program = with_slopes(program, q.shape[1 if options.heads_first else -2], q.device)
    program.check_ints()
    captured = [_as_read(tensor, q) for tensor in program.tensors]
    if kept is not None and q.is_cuda and all(map(operator.is_, captured, program.tensors)):  # copies differ by call
        program.kept = kept
    if not program.has_score:  # which keys are visible has no derivative
        captured = [tensor.detach() for tensor in captured]
    if torch.are_deterministic_algorithms_enabled():
        options = made_deterministic(options)
    seed = None if seed is None else signed(seed)
    out, lse = passes.run(program, given, captured, options, seed, signed(offset), return_lse)
    return (out, lse) if return_lse else out


def _as_read(tensor, q):
    """A captured tensor as kernels read it. A learned number on the CPU follows the queries to their device, as in torch's
    own operations."""
    if tensor.dim() == 0:
        return tensor.to(q.device)
    return tensor if tensor.is_contiguous() else tensor.contiguous()
