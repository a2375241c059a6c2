"""Arguments of attention() and attention_packed() as the binding takes them: Options and Tensors."""

from __future__ import annotations

import operator

from flash_attention.arguments.names import refusal
from flash_attention.options import NAMED, Options, Tensors

_LAYOUTS = {"bshd": False, "bhsd": True}
_ALIGNMENTS = {"bottom_right": False, "top_left": True}
_PRECISIONS = ("auto", "ieee", "fast", "tf32")


def make_options(
    *,
    scale=None,
    softcap=0.0,
    causal=False,
    alignment="bottom_right",
    window=(-1, -1),
    dropout_p=0.0,
    deterministic=False,
    layout="bshd",
    kernel=None,
    max_seqlen_q=0,
    max_seqlen_kv=0,
    block_sizes=(0, 0),
    key_block_size=None,
    **named,
):
    """Options from the arguments of attention(). `named`: those of NAMED."""
    precision = named.get("precision", "auto")
    try:
        left, right = window
        top_left, heads_first = _ALIGNMENTS[alignment], _LAYOUTS[layout]
        if precision not in _PRECISIONS:
            raise KeyError(precision)
    except (KeyError, TypeError, ValueError):
        raise _refusal(alignment, window, layout, precision) from None
    # A number first: in a trace with sizes that vary it is symbolic, and has no attributes to ask for.
    if not (scale is None or isinstance(scale, (float, int))) and getattr(scale, "requires_grad", False):
        scale = _constant("scale", scale, "score * scale with scale=1")
    if not isinstance(softcap, (float, int)) and getattr(softcap, "requires_grad", False):
        softcap = _constant("softcap", softcap, "softcap * torch.tanh(score / softcap)")
    standard = kernel == "standard"
    return Options(  # in order: by name it takes 0.3 us more, and every call of the general path comes by here
        max_seqlen_q,
        max_seqlen_kv,
        scale,
        softcap,
        causal,
        top_left,
        -1 if left is None else left,
        -1 if right is None else right,
        dropout_p,
        deterministic,
        heads_first,
        standard,
        "" if kernel is None or standard else kernel,
        *block_sizes,
        *((0, 0) if key_block_size is None else _list_sizes(key_block_size)),
        *{**NAMED, **named}.values(),
    )


def _list_sizes(key_block_size):
    try:
        queries, keys = map(operator.index, key_block_size)
    except (TypeError, ValueError):
        raise refusal(TypeError, "key_block_size", f"expected (queries, keys), got {key_block_size!r}") from None
    if queries < 1 or keys < 1:
        raise refusal(ValueError, "key_block_size", f"got {(queries, keys)}; allowed are 1 and up")
    return queries, keys


def _constant(name, value, score_mod):
    """A number that is a tensor of torch and requires a gradient, for a call that has none to give."""
    import torch

    from flash_attention.pytorch.canonical import refuse_gradient

    if torch.is_grad_enabled():
        refuse_gradient(name, score_mod)
    return value.detach()


def _refusal(alignment, window, layout, precision):
    for name, value, allowed in (
        ("layout", layout, _LAYOUTS),
        ("alignment", alignment, _ALIGNMENTS),
        ("precision", precision, _PRECISIONS),
    ):
        if value not in tuple(allowed):
            return refusal(ValueError, name, f"got {value!r}; allowed are {' and '.join(map(repr, allowed))}")
    return refusal(ValueError, "window", f"got {window!r}; expected (left, right)")


def with_tile(kernel, tile):
    """The kernel's name with a tile, as the planner reads it: "forward/sm80@64x128"."""
    try:
        queries, keys = map(operator.index, tile)
    except (TypeError, ValueError):
        raise TypeError(f"tile: expected (queries, keys), got {tile!r}") from None
    if kernel == "standard":
        raise ValueError('tile: the textbook algorithm, kernel="standard", has none')
    return f"{kernel or ''}@{queries}x{keys}"


def plain_masks(hidden_rows, causal, window, block_mask, seq_q=None):
    """hidden_rows, causal, window, the map of a block mask and the sizes of its blocks. seq_q: None in a packed call."""
    from flash_attention.masks.blocks import block_map
    from flash_attention.masks.intervals import plain_rows

    hidden_rows, causal, window = plain_rows(hidden_rows, causal, window, seq_q)
    return (hidden_rows, causal, window, *block_map(block_mask))


_OPTIONS_BY_NAME = (
    *("scale", "softcap", "causal", "alignment", "window", "dropout_p", "deterministic", "layout", "key_block_size"),
    *NAMED,
)


def binding_arguments(arguments):
    """(Tensors, Options) from the arguments of attention() or attention_packed() by name."""
    tensors = Tensors(**{name: arguments.get(name) for name in Tensors._fields})
    if tensors.cu_seqlens_kv is None:
        tensors = tensors._replace(cu_seqlens_kv=tensors.cu_seqlens_q)
    given = {name: arguments[name] for name in _OPTIONS_BY_NAME if name in arguments}
    if tensors.hidden_rows is not None or tensors.block_mask is not None:
        hidden_rows, given["causal"], given["window"], block_mask, given["block_sizes"] = plain_masks(
            tensors.hidden_rows, arguments["causal"], arguments["window"], tensors.block_mask
        )
        tensors = tensors._replace(hidden_rows=hidden_rows, block_mask=block_mask)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        given[name] = arguments.get(name) or 0
    kernel, tile = arguments["kernel"], arguments.get("tile")
    kernel = kernel if tile is None else with_tile(kernel, tile)
    return tensors, make_options(**given, kernel=kernel)
