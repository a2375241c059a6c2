"""context_attention(): attention over a sequence that is cut across the ranks of a process group."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.functional import attention, attention_packed
from flash_attention.parallel import arguments, gather, ring, ulysses
from flash_attention.parallel.agreement import Agreement
from flash_attention.parallel.call import Call
from flash_attention.parallel.peers import Peers, resolve_group
from flash_attention.parallel.sharded import from_local, to_local
from flash_attention.pytorch.gradients import refuse
from flash_attention.pytorch.untraced import untraced

_PASSES = {"ring": ring, "all_gather": gather}
_NO_OPTIONS = ("q", "k", "v", "mesh_or_group", "wrong")


@untraced
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh_or_group: Any = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    cu_seqlens: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    scale: float | None = None,
    method: Literal["ring", "all_gather", "ulysses", "auto"] = "auto",
    layout: Literal["zigzag", "contiguous"] = "zigzag",
    deterministic: bool = False,
    return_lse: bool = False,
    timeout: float | None = None,
    kernel: str | None = None,
    **wrong: NoReturn,
) -> Any:
    """attention() of the whole sequence for the rows that this rank holds. Every rank of the group calls it.

        mine = [split(tensor, world, rank) for tensor in (q, k, v)]  # of the whole sequence
        out = context_attention(*mine, causal=True)

    Args:
        q, k, v: this rank's rows, [batch, rows, heads, head_dim] as in attention(), the same number on every rank; or
            DTensors sharded along the sequence. With cu_seqlens: [rows, heads, head_dim].
        mesh_or_group: a ProcessGroup, a DeviceMesh of one axis, or None for the default group (the mesh of DTensors).
        causal, window, softcap, sink, scale: as in attention(), in terms of the whole sequence.
        cu_seqlens: documents packed end to end in the whole sequence, [documents + 1]; a list or a tensor on the host
            costs no synchronisation.
        bias, mask: rows of this rank, columns of the whole sequence: [batch | 1, heads_q | 1, rows | 1, seq].
        key_lengths: int32 [batch], in terms of the whole sequence.
        dropout_p, seed, offset: the same dropped entries as on one device. seed=None: the seed of rank 0.
        method: "ring" (one block of K and V arrives while the previous one is attended), "all_gather" (first all of K and
            V, then one call), "ulysses" (heads instead of rows; for any number of heads), or "auto". Dropout and
            alibi_slopes depend on the indices of rows and heads: they are always computed by "ulysses".
        layout: how the rows were split: see split().
        timeout: seconds to wait for another rank on the host; None = the group's own.

    Returns:
        out, shaped as q but with head_dim_v as the last size; or (out, lse). Differentiable in q, k, v, bias, sink and
        through lse.
        Gradients of sink, and of a bias that has one row for all, are this rank's share: add them up over the ranks.
    """
    if wrong:
        refuse_keywords(context_attention, wrong)
    if arguments.is_sharded(q):
        options = {name: value for name, value in locals().items() if name not in _NO_OPTIONS}
        local, mesh = to_local(q, k, v, mesh_or_group, packed=cu_seqlens is not None)
        return from_local(q, context_attention(*local, mesh, **options), return_lse)
    q, k, v = arguments.autocast(q, k, v)
    group = resolve_group(mesh_or_group)
    peers = Peers(group, timeout)
    window = arguments.bounds(causal, window)
    documents = arguments.documents_of(cu_seqlens)
    if peers.world == 1:
        arguments.check_names(method, layout)
        common = {
            "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "bias": bias, "mask": mask,
            "key_lengths": key_lengths, "sink": sink, "dropout_p": dropout_p, "seed": seed, "offset": offset,
            "scale": scale, "deterministic": deterministic, "return_lse": return_lse, "kernel": kernel,
        }  # fmt: skip
        if cu_seqlens is None:
            return attention(q, k, v, **common)
        starts = torch.tensor(documents, dtype=torch.int32).to(q.device)
        return attention_packed(q, k, v, starts, **common)
    fault = arguments.fault(
        q, k, v, bias=bias, mask=mask, documents=documents, world=peers.world, method=method, layout=layout, window=window,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, key_lengths=key_lengths, sink=sink,
    )  # fmt: skip
    fields = arguments.fields(
        q, k, v, window=window, softcap=softcap, documents=documents, method=method, layout=layout, scale=scale,
        dropout_p=dropout_p, seed=seed, offset=offset, bias=bias, mask=mask, sink=sink, alibi_slopes=alibi_slopes,
        key_lengths=key_lengths,
    )  # fmt: skip
    agreement = Agreement(peers, fields, fault, arguments.device_of(q))
    if fault:
        agreement.wait()
    packed = bool(documents)
    if packed:
        q, k, v = (tensor[None] for tensor in (q, k, v))
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    method = arguments.chosen(method, q, k, peers.world, dropout_p, alibi_slopes)
    shape = arguments.shape_of(q, peers.world, layout, window, documents, bias is not None or mask is not None)
    lengths = None if key_lengths is None else key_lengths.to(q.device)
    mask = arguments.four_axes(mask)
    call = Call(peers, shape, agreement, scale, softcap, deterministic, kernel, mask, lengths)
    sink = None if sink is None else sink.float().contiguous()
    if method == "ulysses":
        seed = arguments.common_seed(seed, peers, q.device) if dropout_p else 0
        options = {"dropout_p": dropout_p, "seed": seed, "offset": offset, "alibi_slopes": alibi_slopes}
        out, lse = ulysses.attend(call, q, k, v, sink, options)
    else:
        out, lse = Passes.apply(_PASSES[method], call, q, k, v, arguments.four_axes(bias), sink)
    if packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


class Passes(torch.autograd.Function):
    """(out, lse) by the passes of a method."""

    @staticmethod
    def forward(ctx, method, call, q, k, v, bias, sink):
        out, lse = method.forward(call, q, k, v, bias, sink)
        ctx.save_for_backward(q, k, v, bias, sink, out, lse)
        ctx.method, ctx.call = method, call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        needs = (ctx.needs_input_grad[5], ctx.needs_input_grad[6])

        def gradients(q, k, v, bias, sink, out, lse, dout, dlse):
            dout = torch.zeros_like(out) if dout is None else dout
            return tuple(ctx.method.backward(ctx.call, q, k, v, bias, sink, out, lse, dout, dlse, needs))

        tensors = (*ctx.saved_tensors, dout, dlse)
        found = Gradients.apply(gradients, *tensors) if torch.is_grad_enabled() else gradients(*tensors)
        return None, None, *found


class Gradients(torch.autograd.Function):
    """The backward pass under create_graph=True: its derivative is refused, not dropped."""

    @staticmethod
    def forward(ctx, function, *tensors):
        return function(*tensors)

    backward = staticmethod(refuse)
