"""Forward mode where there is no pass for it (gradients.computes), with lists of keys: the tangent of out and lse by those
of q, k, v and sink, by a backward pass, in O(sequence) memory.

With s = scale q k^T, p its softmax and a dot for tangents (docs/numerics.md, "Forward mode"):

    s. = scale (q. k^T + q k.^T)        lse. = sum_j p s.        out. = sum_j p (s. - lse.) v + sum_j p v.

The first sum is one that a backward pass has: dq = scale sum_j p (dout v'^T - delta) k'. So it is called with

    k' = [k, v], q' = [q, 0]            the same scores, and a dq whose last columns are a sum over v
    v' = [k, k.], dout' = [q., q]       whose product is s. but for the scale

and delta is lse. but for the scale: from out' = sum_j p v', which is a forward pass with v' as values. Under a soft cap s.
has its derivative in it, which backward applies last: there delta is 0, and a column of ones in k' gives sum_j p s. itself.
So every kernel serves it, with every mask; a tangent costs about eight times forward."""

import torch

from flash_attention.options import NUM_TENSORS, Options
from flash_attention.pytorch.gradients import Held, gradients

_MOST = 576  # columns of a head
_ONES = 8  # columns of ones under a soft cap, of which one counts: a multiple of 8 is fast


def refuse(what):
    raise NotImplementedError(f"attention: forward-mode derivatives (jvp, jacfwd, dual tensors) are not computed {what}")


def check(tangents):
    """Refuses, by name, tangents that no pass computes. `tangents`: Tensors, None for those without one."""
    if tangents.alibi_slopes is not None:
        refuse("with respect to alibi_slopes")


def _check(options, tangents, head_dim, head_dim_v):
    """Refuses tangents that backward passes do not compute."""
    check(tangents)
    if options.dropout_p:
        refuse("with dropout_p and lists of keys")
    if tangents.bias is not None:
        refuse("with respect to bias and with lists of keys")
    ones = _ONES if options.softcap else 0
    if max(2 * head_dim, head_dim + head_dim_v + ones) > _MOST:
        refuse(f"for a head_dim of {head_dim} and a head_dim_v of {head_dim_v}: 2 head_dim, and both, are at most {_MOST}")


def tangents_of(tensors, options, out, lse, tangents):
    """(out., lse.) of a call with the results out and lse; `tangents` as in check()."""
    q, k, v = tensors.q, tensors.k, tensors.v
    _check(options, tangents, q.shape[-1], v.shape[-1])
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    options = _with(options, scale=scale, kernel="", standard=False)
    out_t = torch.zeros_like(out) if tangents.v is None else _forward(tensors._replace(v=_dense(tangents.v)), options)
    lse_t = torch.zeros_like(lse)
    if tangents.q is not None or tangents.k is not None:
        pairs = [(tangents.q, k), (q if tangents.k is not None else None, tangents.k)]
        queries, keys = (torch.cat(parts, -1) for parts in zip(*(p for p in pairs if p[0] is not None), strict=True))
        of_values, lse_t = (_capped if options.softcap else _centred)(tensors, options, out, lse, queries, keys, scale)
        out_t = out_t + of_values
    if tangents.sink is not None:
        of_sink = _per_row(tangents.sink.float(), lse, tensors) * _share(tensors.sink, lse, tensors)
        lse_t = lse_t + of_sink
        out_t = out_t - (_as_rows(of_sink, options, tensors) * out.float()).to(out.dtype)
    return out_t, lse_t


def _centred(tensors, options, out, lse, queries, keys, scale):
    """sum_j p (s. - lse.) v and lse., where s. = scale queries keys^T."""
    q, k, v = tensors.q, tensors.k, tensors.v
    sums = _forward(tensors._replace(v=keys), options)
    columns = torch.cat([k, v], -1)
    found = gradients(
        tensors._replace(q=_padded(q, columns), k=columns, v=keys), options, sums, lse, None, queries, None, False, False
    )[0][..., q.shape[-1] :]
    lse_t = _from_rows((queries.float() * sums.float()).sum(-1), options, tensors) * scale
    return found, torch.where(lse == -torch.inf, 0.0, lse_t)


def _capped(tensors, options, out, lse, queries, keys, scale):
    """The same under a soft cap."""
    q, k, v = tensors.q, tensors.k, tensors.v
    columns = torch.cat([k, v, k.new_ones((*k.shape[:-1], _ONES))], -1)
    nothing = torch.zeros_like(queries)
    found = gradients(
        tensors._replace(q=_padded(q, columns), k=columns, v=keys), options, nothing, lse, None, queries, None, False, False
    )[0][..., q.shape[-1] :]
    shift = found[..., v.shape[-1] : v.shape[-1] + 1].float()
    of_values = found[..., : v.shape[-1]].float() - shift * out.float()
    return of_values.to(out.dtype), _from_rows(shift[..., 0], options, tensors)


def _forward(tensors, options):
    """out, with derivatives of its own."""
    from flash_attention.pytorch.transforms import TransformedAttention

    return TransformedAttention.apply(*tensors[:3], Held(options), None, 0, *tensors[3:NUM_TENSORS])[0]


def _with(options, **changed):
    return Options(*(changed.get(name, value) for name, value in zip(Options._fields, options, strict=True)))


def _dense(tensor):
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _padded(q, columns):
    return torch.nn.functional.pad(q, (0, columns.shape[-1] - q.shape[-1]))


def _from_rows(values, options, tensors):
    """A number of each query, in the layout of lse."""
    if tensors.cu_seqlens_q is not None:
        return values.transpose(0, 1).contiguous()
    return (values if options.heads_first else values.transpose(1, 2)).contiguous()


def _as_rows(values, options, tensors):
    """The other way round, with an axis for columns."""
    if tensors.cu_seqlens_q is not None:
        return values.transpose(0, 1)[..., None]
    return (values if options.heads_first else values.transpose(1, 2))[..., None]


def _per_row(of_heads, lse, tensors):
    return (of_heads[:, None] if tensors.cu_seqlens_q is not None else of_heads[None, :, None]).expand_as(lse)


def _share(sink, lse, tensors):
    """What the sink takes of each row."""
    return torch.where(lse == -torch.inf, 0.0, (_per_row(sink.float(), lse, tensors) - lse).exp())
