"""flex_attention: torch's signature, with the scores as a program of this library."""

import sys

import torch

from flash_attention import functional
from flash_attention.arguments.options import make_options
from flash_attention.arguments.seeds import signed
from flash_attention.flex import passes
from flash_attention.flex.block_mask import check_sizes, mask_mods_of
from flash_attention.flex.program import record
from flash_attention.options import NUM_TENSORS, Tensors, made_deterministic
from flash_attention.pytorch import autograd as torch_autograd
from flash_attention.pytorch.transforms import is_transformed
from flash_attention.pytorch.untraced import untraced

functional.is_tracing()  # at its first use it tells the binding what torch is


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
):
    """softmax(score_mod(scale * q k^T) where mask_mod) v, forward and backward, on CPUs and GPUs.

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
    if query.dim() == 4 and key.dim() == 4 and not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads, key and value {key.shape[1]}; set enable_gqa=True where they differ"
        )
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise NotImplementedError("return_aux: max_scores is not computed; lse is")
    if return_aux is not None and return_lse:
        raise ValueError("return_lse: got True beside return_aux; allowed is one of the two")
    masks = [] if block_mask is None else mask_mods_of(block_mask)
    if query.dim() == key.dim() == value.dim() == 4:
        if key.shape[0] == value.shape[0] == 1 < query.shape[0]:  # one cache for all of the batch, as torch takes it
            key, value = (tensor.expand(query.shape[0], -1, -1, -1) for tensor in (key, value))
        if block_mask is not None:
            check_sizes(block_mask, query, key)
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    wants_lse = return_lse or return_aux is not None
    tensors = Tensors(query, key, value)
    kernel = (kernel_options or {}).get("kernel")
    options = make_options(scale=scale, alignment="top_left", layout="bhsd", kernel=kernel)
    result = run(tensors, options, 0, 0, wants_lse, score_mod, masks)
    if return_aux is None:
        return result
    out, lse = result
    given = sys.modules[type(return_aux).__module__]  # torch's, of whatever version made the request
    return out, given.AuxOutput(lse=lse if return_aux.lse else None)


@untraced
def run_program(tensors, options, seed, offset, return_lse, score_mod, mask_mod):
    """attention() with a score_mod, a mask_mod or both."""
    masks = [] if mask_mod is None else [mask_mod]
    return run(tensors, options, seed, offset, return_lse, score_mod, masks)


def run(tensors, options, seed, offset, return_lse, score_mod, mask_mods):
    """A call of attention() with programs; the arguments are those of torch_autograd.run()."""
    if is_transformed() and (score_mod is not None or mask_mods):
        raise NotImplementedError("score_mod, mask_mod: transforms of torch.func and forward-mode derivatives take neither")
    program = record(score_mod, None, mask_mods)
    if program is None:
        return torch_autograd.run(tensors, options, seed, offset, return_lse)
    if not isinstance(tensors.q, torch.Tensor):
        raise TypeError(f"q: programs take tensors of torch, got {type(tensors.q).__name__}")
    plain = torch_autograd.is_plain(tensors)
    torch_autograd.check(tensors, plain)
    q, k, v = tensors.q, tensors.k, tensors.v
    if torch_autograd.is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
        q, k, v = (torch_autograd._autocast(tensor, torch.get_autocast_dtype(q.device.type)) for tensor in (q, k, v))
    given = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v)]
    if not plain:
        given += torch_autograd._as_taken(tensors, options)[3:NUM_TENSORS]
    captured = [_as_read(tensor, q) for tensor in program.tensors]
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
