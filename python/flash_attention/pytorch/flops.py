"""What the ops count for in torch.utils.flop_counter.FlopCounterMode: products of matrices, hidden scores included.

That is how torch counts its own attention: a multiplication and an addition for each of the two products of the forward
pass and the five of the backward pass, one of which repeats the scores.

Formulas are registered when torch's module is imported, or at once where it is: it imports Triton, which takes longer than
the rest of a program's first call.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

import torch

from flash_attention.options import NUM_TENSORS, Tensors, split
from flash_attention.pytorch import derivatives, ops  # noqa: F401 (the ops themselves)

_COUNTER = "torch.utils.flop_counter"
_formulas = {}


def counts_as(op, formula):
    """formula(*arguments, out_val) says how many operations the op is."""
    _formulas[op] = formula
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _register(counter):
    for op, formula in _formulas.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(formula)


class _WhenImported(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module
        return spec


def forward_flops(*arguments, out_val=None, **unused):
    pairs, head_dim, head_dim_v = _sizes(arguments)
    return 2 * pairs * (head_dim + head_dim_v)


def backward_flops(*arguments, out_val=None, **unused):
    pairs, head_dim, head_dim_v = _sizes(arguments)
    return 2 * pairs * (3 * head_dim + 2 * head_dim_v)


def tangent_flops(*arguments, out_val=None, **unused):
    pairs, head_dim, head_dim_v = _sizes(arguments)
    return 2 * pairs * (3 * head_dim + 3 * head_dim_v)


def second_flops(*arguments, out_val=None, **unused):
    pairs, head_dim, head_dim_v = _sizes(arguments)
    return 2 * pairs * (10 * head_dim + 6 * head_dim_v)


def cache_flops(*arguments, out_val=None, **unused):
    """The count for forward_cache, which torch_cache defines."""
    q, v = arguments[0], arguments[2]
    return 2 * q.shape[-2] * _cache_scores(arguments) * (q.shape[-1] + v.shape[-1])


def _cache_scores(arguments):
    """Scores of a query head over all sequences. The keys of a sequence are those that its cache holds now."""
    tensors = Tensors(*arguments[: NUM_TENSORS + 2])
    q, k, starts_q = tensors.q, tensors.k, tensors.cu_seqlens_q
    used_kv, page_table = tensors.seqused_kv, tensors.page_table
    capacity = k.shape[1] if page_table is None else k.shape[1] * page_table.shape[1]
    batch = k.shape[0] if page_table is None else page_table.shape[0]
    if not _readable(used_kv) or not (starts_q is None or _readable(starts_q)):  # the lengths are unknown: the bounds
        return (q.shape[0] if starts_q is not None else batch * q.shape[1]) * capacity
    keys = used_kv.long().clamp(0, capacity)
    queries = q.shape[1] if starts_q is None else starts_q.diff().long()
    return int((queries * keys).sum())


def _readable(tensor):
    return tensor is not None and not isinstance(tensor, torch._subclasses.FakeTensor) and not tensor.is_meta


def _sizes(arguments):
    """(scores over all heads and sequences, head_dim, head_dim_v)"""
    tensors, options, _ = split(arguments)
    q, k, v, starts_q = tensors.q, tensors.k, tensors.v, tensors.cu_seqlens_q
    if starts_q is None:
        heads, seq = (1, 2) if options.heads_first else (2, 1)
        pairs = q.shape[0] * q.shape[heads] * q.shape[seq] * k.shape[seq]
    elif not _readable(starts_q):  # unknown lengths: the bounds
        pairs = (
            (starts_q.shape[0] - 1)
            * q.shape[1]
            * (options.max_seqlen_q or q.shape[0])
            * (options.max_seqlen_kv or k.shape[0])
        )
    else:
        pairs = q.shape[1] * int((starts_q.diff().long() * tensors.cu_seqlens_kv.diff().long()).sum())
    return pairs, q.shape[-1], v.shape[-1]


counts_as(torch.ops.flash_attention.forward, forward_flops)
counts_as(torch.ops.flash_attention.backward, backward_flops)
counts_as(torch.ops.flash_attention.tangent, tangent_flops)
counts_as(torch.ops.flash_attention.second, second_flops)
