"""Checks of a context-parallel call's arguments, and the values derived from them."""

import torch

from flash_attention.parallel.cut import Shape
from flash_attention.parallel.layout import LAYOUTS

_HALF_OR_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
METHODS = ("ring", "all_gather", "ulysses", "auto")


def is_sharded(tensor):
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def device_of(q):
    return q.device if isinstance(q, torch.Tensor) else torch.device("cpu")


def autocast(*tensors):
    """The tensors in the type that torch.autocast asks for, as in attention()."""
    device = device_of(tensors[0]).type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [tensor.to(dtype) if getattr(tensor, "dtype", None) in _HALF_OR_SINGLE else tensor for tensor in tensors]


def bounds(causal, window):
    try:
        left, right = (-1 if bound is None or bound < 0 else int(bound) for bound in window)
    except (TypeError, ValueError):
        raise ValueError(f"window: got {window!r}; expected (left, right)") from None
    return left, 0 if causal else right


def documents_of(cu_seqlens):
    if cu_seqlens is None:
        return ()
    return tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else (int(start) for start in cu_seqlens))


def four_axes(scores):
    return None if scores is None else scores.reshape((1,) * (4 - scores.dim()) + scores.shape)


def shape_of(q, world, layout, window, documents, cut_columns):
    return Shape(q.shape[1] * world, world, layout, *window, documents, cut_columns)


def chosen(method, q, k, world, dropout_p, alibi_slopes):
    """The method of a call. Gathers if K and V of all ranks need no more memory than q, k, v and out of this rank."""
    if dropout_p or alibi_slopes is not None:
        return "ulysses"
    if method != "auto":
        return method
    return "all_gather" if world * k.shape[2] <= q.shape[2] + k.shape[2] else "ring"


def common_seed(seed, peers, device):
    """The seed of rank 0 if none is given: every rank draws the same bits."""
    if seed is not None:
        return seed
    found = torch.randint(2**63 - 1, (1,)).to(device)
    if peers.rank == 0:
        peers.post("the seed", [(found, rank) for rank in range(1, peers.world)], []).wait()
    else:
        peers.post("the seed", [], [(found, 0)]).wait()
    return int(found)


def fault(q, k, v, *, bias, mask, documents, world, method, layout, window, dropout_p, alibi_slopes, key_lengths, sink):
    """The error of this rank's arguments; "" if there is none."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            return f"{name}: expected a tensor of torch, got {type(tensor).__name__}"
        axes, rank = ("[rows, heads, head_dim]", 3) if documents else ("[batch, rows, heads, head_dim]", 4)
        if tensor.dim() != rank:
            return f"{name}: got shape {list(tensor.shape)}; expected {rank} axes, {axes}"
        if tensor.dtype not in _HALF_OR_SINGLE or tensor.dtype != q.dtype:
            return f"{name}: got {tensor.dtype}; allowed: float32, float16 or bfloat16, the same for q, k and v"
    return (
        _fault_of_names(method, layout)
        or _fault_of_sizes(q, k, v, documents, world, layout)
        or _fault_of_scores(q, bias, mask, documents, world, dropout_p, alibi_slopes, method)
        or _fault_of_the_rest(q, k, dropout_p, key_lengths, sink, documents)
    )


def check_names(method, layout):
    """Refuses wrong names, which a group of one rank would otherwise not notice."""
    fault = _fault_of_names(method, layout)
    if fault:
        raise ValueError(fault)


def _fault_of_names(method, layout):
    if method not in METHODS:
        return f"method: got {method!r}; allowed are {', '.join(map(repr, METHODS))}"
    if layout not in LAYOUTS:
        return f"layout: got {layout!r}; allowed are 'zigzag' and 'contiguous'"
    return ""


def _fault_of_sizes(q, k, v, documents, world, layout):
    rows, heads = q.shape[-3], q.shape[-2]
    if k.shape[:-2] != q.shape[:-2] or v.shape[:-1] != k.shape[:-1] or k.shape[-1] != q.shape[-1]:
        return f"q, k, v: got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; expected the same batch and rows in all"
    if k.shape[-2] == 0 or heads % k.shape[-2]:
        return f"k: got {k.shape[-2]} heads; allowed: a divisor of the {heads} heads of q"
    if q.shape[-1] % 8 or v.shape[-1] % 8:
        return f"head_dim: got {q.shape[-1]} and {v.shape[-1]}; allowed: multiples of 8"
    if layout == "zigzag" and rows % 2:
        return f"q: got {rows} rows; layout 'zigzag' cuts them in two, so their number must be even ({world} ranks)"
    if documents:
        total = rows * world
        if documents[0] != 0 or documents[-1] != total or list(documents) != sorted(documents):
            return f"cu_seqlens: got {_short(documents)}; expected numbers that rise from 0 to {total}, the rows of all"
    return ""


def _fault_of_scores(q, bias, mask, documents, world, dropout_p, alibi_slopes, method):
    if not 0 <= dropout_p < 1:
        return f"dropout_p: got {dropout_p}; allowed: from 0 to below 1"
    for name, scores in (("bias", bias), ("mask", mask)):
        if scores is None:
            continue
        if documents:
            return f"{name}: got a tensor together with cu_seqlens; it cannot be cut by documents"
        if dropout_p or alibi_slopes is not None or method == "ulysses":
            return f"{name}: got a tensor with 'ulysses' (dropout and alibi_slopes use it); its rows cannot be cut"
        batch, rows, heads, _ = q.shape
        allowed = ((1, batch), (1, heads), (1, rows), (rows * world,))
        sizes = (1,) * (4 - scores.dim()) + tuple(scores.shape)
        if len(sizes) != 4 or any(size not in sides for size, sides in zip(sizes, allowed, strict=False)):
            return (
                f"{name}: got shape {list(scores.shape)}; it cannot be cut: expected the rows of this rank and the columns "
                f"of the whole sequence, [{batch} or 1, {heads} or 1, {rows} or 1, {rows * world}]"
            )
        if name == "mask" and scores.dtype != torch.bool:
            return f"mask: got {scores.dtype}; allowed: bool"
    return ""


def _fault_of_the_rest(q, k, dropout_p, key_lengths, sink, documents):
    if key_lengths is not None and (documents or tuple(key_lengths.shape) != (q.shape[0],)):
        return f"key_lengths: got shape {list(key_lengths.shape)}; expected [batch], without cu_seqlens"
    if sink is not None and tuple(sink.shape) != (q.shape[-2],):
        return f"sink: got shape {list(sink.shape)}; expected [{q.shape[-2]}], one for each head of q"
    return ""


def _short(numbers):
    return str(list(numbers)) if len(numbers) < 12 else f"[{', '.join(map(str, numbers[:6]))}, ... {numbers[-1]}]"


def fields(q, k, v, **options):
    """{name: value} of everything in which ranks must agree."""
    found = {}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, torch.Tensor):
            sizes = (*tensor.shape, 0, 0, 0, 0)[:4]
            found |= {f"{name}.shape[{axis}]": size for axis, size in enumerate(sizes)}
            found |= {f"{name}.dtype": str(tensor.dtype), f"{name}.requires_grad": int(tensor.requires_grad)}
        else:
            found |= {f"{name}.shape[{axis}]": 0 for axis in range(4)} | {f"{name}.dtype": "", f"{name}.requires_grad": 0}
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            value = (value.dim(), value.requires_grad)
        found[name] = value
    found["grad_mode"] = torch.is_grad_enabled()
    return found
