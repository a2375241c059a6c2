"""attention() and attention_packed(): one signature for every tensor library."""

from __future__ import annotations

import sys

from flash_attention import _core
from flash_attention.arguments.options import make_options, plain_masks, planned, with_tile
from flash_attention.arguments.seeds import check_seed
from flash_attention.options import Tensors

TYPE_CHECKING = False  # typing costs more to import than the rest of the package
if TYPE_CHECKING:
    from typing import Any, Literal


# Import statements, which torch.compile can follow: a compiled function may be the first to come here.
def _run_of_torch():
    from flash_attention.pytorch.autograd import run

    return run


def _run_of_arrays():
    from flash_attention.arrays import run

    return run


def _run_of_jax():
    from flash_attention.jax import run

    return run


def _run_program():
    from flash_attention.flex.attention import run_program

    return run_program


def _run_prepared():
    from flash_attention.flex.attention import run_prepared

    return run_prepared


def _blocks_as_program():
    from flash_attention.flex.block_mask import as_program

    return as_program


# Which function runs the tensors of which library: run(tensors, options, seed, offset, return_lse).
_LIBRARIES = {
    "torch": _run_of_torch,
    "numpy": _run_of_arrays,
    "cupy": _run_of_arrays,
    "jax": _run_of_jax,
    "jaxlib": _run_of_jax,
}
_runs = {}

# The direct route in one call, _core.attend: for this type, where nothing traces. Set at the first use of torch.
eager_type = None
state_of_torch = None  # of each thread, in which torch.compile keeps what it traces


def is_tracing():
    """Whether torch.compile traces the caller."""
    if state_of_torch is None:
        if "torch" not in sys.modules:
            return False
        from flash_attention.pytorch import autograd

        autograd.connect()
    try:
        return state_of_torch.tracing_context is not None
    except AttributeError:  # no trace yet in this thread; torch leaves None behind one, and an attribute is found faster
        state_of_torch.tracing_context = None
        return False


# torch.compile calls it and keeps the answer, without a look at what it reads: that changes with the first use of the
# package, and a trace that is begun anew must find what the one before has found.
is_tracing._dynamo_marked_constant = True


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    hidden_rows: Any = None,
    block_mask: Any = None,
    key_lengths: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    scale: float | None = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    alignment: Literal["bottom_right", "top_left"] = "bottom_right",
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    invariant: bool = False,
    tile: tuple[int, int] | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    attention_chunk: int = 0,
    precision: Literal["auto", "ieee", "fast", "tf32"] = "auto",
) -> Any:
    """softmax(scale * q k^T + ...) v, without ever storing the scores.

    Differentiable (torch, JAX) in q, k, v, bias and sink, and through the returned lse.

    Args:
        q: [batch, seq_q, heads_q, head_dim], float32, float16 or bfloat16, last stride 1, head_dim at most 576,
            fast if a multiple of 8. With layout="bhsd": [batch, heads_q, seq_q, head_dim].
        k: [batch, seq_kv, heads_kv, head_dim]; heads_kv divides heads_q (grouped and multi-query attention).
        v: [batch, seq_kv, heads_kv, head_dim_v]; head_dim_v may differ from head_dim.
        causal: query i sees keys j <= i + seq_kv - seq_q (see alignment).
        window: (left, right), how many keys before and after the diagonal are visible, inclusive; -1 or None = all.
        softcap: cap * tanh(score / cap) where positive.
        alibi_slopes: float32 [heads_q] or [batch, heads_q]; adds -slope * |i + seq_kv - seq_q - j|.
        bias: added to the scores, [batch, heads_q, seq_q, seq_kv] or 1 for any size, leading axes may be left out.
        mask: bool in the same shapes as bias; True = visible.
        hidden_rows: int32 [batch, heads_kv, seq_kv, n], n = 1, 2 or 4, or 1 for batch and heads: key j is hidden from the
            queries [r0, inf), [r0, r1), or [r0, r1) and [r2, r3). Or what flash_attention.masks builds. docs/masks.md.
        block_mask: which blocks of queries see which blocks of keys: flash_attention.masks.BlockMask, or torch's; or what
            create_block_mask gave, here or in torch.
        key_lengths: int32 [batch]; keys from there on are padding. The diagonal stays where seq_kv puts it.
        seqused_q, seqused_kv: int32 [batch]; only that many queries or keys are used, and the diagonal follows.
        sink: [heads_q], one more logit per head in the denominator.
        dropout_p: probability of dropping a weight, in [0, 1).
        seed, offset: of dropout; the mask is a pure function of them. seed=None draws one from the library's generator.
        scale: 1 / sqrt(head_dim) if None.
        layout: "bshd" or "bhsd".
        alignment: "bottom_right", or "top_left" where query i sees keys j <= i.
        deterministic: the same gradient bits in every run.
        return_lse: also return the logarithm of the sum of exponentials, float32 [batch, heads_q, seq_q].
        kernel: a name from kernels() instead of the planner's choice, in the pass that it belongs to; "standard" for the
            textbook algorithm.
        score_mod: score_mod(score, b, h, i, j) -> the score, after all of the above; docs/masks.md (torch alone).
        mask_mod: mask_mod(b, h, i, j) -> whether query i sees key j, besides all of the above (torch alone).
        invariant: a row's bits do not depend on what else is in the call: on other sequences, lengths, capacities, pages,
            on prefill or decoding. docs/numerics.md; forward only.
        tile: (queries, keys) of a tile of the GPU's forward kernel, for experiments; refused by name where it does not fit.
        q_descale, k_descale, v_descale: of torch tensors in float8 (all e4m3fn or all e5m2), which are worth
            code * descale: a number, float32 [1] or [batch, heads_kv]; None = 1. quantize() makes them. Forward only.
        out_dtype: of out where q is float8: torch.bfloat16 (None), float16 or float32.
        attention_chunk: a query sees the keys of its own chunk of so many positions, besides all of the above (the place of
            query i is i + seq_kv - seq_q, see alignment); 0 = all.
        precision: of float32 on a GPU: "fast", on tensor cores from sm_80 on, three products for one, as exact as float32;
            "tf32", one product, with 11 bits of each factor; "ieee", in float32; "auto", "fast", or what
            torch.get_float32_matmul_precision() allows. docs/numerics.md. On a CPU, and for other types, all are the same.

    Returns:
        out, laid out as q with head_dim_v as last size; or (out, lse). A row that sees no key is 0, its lse -inf.
    """
    if tile is not None:
        kernel = with_tile(kernel, tile)
    if callable(getattr(block_mask, "mask_mod", None)):
        block_mask, mask_mod = _blocks_as_program()(block_mask, mask_mod, q, k, layout)
    plain = kernel is None and score_mod is None and mask_mod is None
    plain = plain and q_descale is None and k_descale is None and v_descale is None and out_dtype is None
    block_sizes, kept = (0, 0), None
    if hidden_rows is not None or block_mask is not None or (mask is not None and type(mask) is not eager_type):
        mask, hidden_rows, block_mask, kept = _bare_masks(mask, hidden_rows, block_mask)
    if hidden_rows is not None or block_mask is not None:
        seq_q = q.shape[-2 if layout == "bhsd" else -3] if len(q.shape) == 4 else None
        hidden_rows, causal, window, block_mask, block_sizes = plain_masks(hidden_rows, causal, window, block_mask, seq_q)
    elif (
        not is_tracing()
        and type(q) is eager_type
        and plain
        and kept is None
        and not (return_lse or invariant or attention_chunk or precision != "auto")
    ):
        out = _core.attend(
            q, k, v, causal, window, softcap, scale, dropout_p, deterministic, layout, alignment,
            alibi_slopes, bias, mask, key_lengths, seqused_q, seqused_kv, sink,
        )  # fmt: skip
        if out is not None:
            return out
    tensors = Tensors(
        q, k, v, bias, mask, alibi_slopes, sink, None, None, seqused_q, seqused_kv, key_lengths, hidden_rows, block_mask,
    )  # fmt: skip
    options = make_options(
        scale=scale, softcap=softcap, causal=causal, alignment=alignment, window=window, dropout_p=dropout_p,
        deterministic=deterministic, layout=layout, kernel=planned(kernel) if invariant else kernel,
        block_sizes=block_sizes, attention_chunk=attention_chunk, precision=precision,
    )  # fmt: skip
    arguments = tensors, options, *check_seed(seed, offset), return_lse
    return _run(arguments, (score_mod, mask_mod), (q_descale, k_descale, v_descale, out_dtype), kept)


def attention_packed(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    hidden_rows: Any = None,
    block_mask: Any = None,
    key_lengths: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    scale: float | None = None,
    alignment: Literal["bottom_right", "top_left"] = "bottom_right",
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    invariant: bool = False,
    tile: tuple[int, int] | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    attention_chunk: int = 0,
    precision: Literal["auto", "ieee", "fast", "tf32"] = "auto",
) -> Any:
    """attention() for sequences of different lengths, packed end to end, without padding.

    Args:
        q: [total_q, heads_q, head_dim].
        k: [total_kv, heads_kv, head_dim].
        v: [total_kv, heads_kv, head_dim_v].
        cu_seqlens_q: int32 [batch + 1]; sequence b is q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]].
        cu_seqlens_kv: int32 [batch + 1]; cu_seqlens_q if None.
        max_seqlen_q, max_seqlen_kv: the longest lengths, or any bound on them; None = unknown, which is never wrong.
        bias, mask: as in attention(), with indices that count inside each sequence: sizes up to
            [batch, heads_q, max_seqlen_q, max_seqlen_kv].
        hidden_rows: int32 [heads_kv, total_kv, n]; rows count inside each sequence.
        block_mask: as in attention(), with blocks that count inside each sequence, for max_seqlen_q and max_seqlen_kv.

    The other arguments are those of attention(). Returns out [total_q, heads_q, head_dim_v], or (out, lse) with lse
    float32 [heads_q, total_q].
    """
    if tile is not None:
        kernel = with_tile(kernel, tile)
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q: expected int32 [batch + 1], got None")
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
        max_seqlen_kv = max_seqlen_kv or max_seqlen_q
    block_sizes, kept = (0, 0), None
    if hidden_rows is not None or block_mask is not None or (mask is not None and type(mask) is not eager_type):
        mask, hidden_rows, block_mask, kept = _bare_masks(mask, hidden_rows, block_mask)
    if hidden_rows is not None or block_mask is not None:
        hidden_rows, causal, window, block_mask, block_sizes = plain_masks(hidden_rows, causal, window, block_mask)
    tensors = Tensors(
        q, k, v, bias, mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, key_lengths,
        hidden_rows, block_mask,
    )  # fmt: skip
    options = make_options(
        scale=scale, softcap=softcap, causal=causal, alignment=alignment, window=window, dropout_p=dropout_p,
        deterministic=deterministic, kernel=planned(kernel) if invariant else kernel, max_seqlen_q=max_seqlen_q or 0,
        max_seqlen_kv=max_seqlen_kv or 0, block_sizes=block_sizes, attention_chunk=attention_chunk, precision=precision,
    )  # fmt: skip
    arguments = tensors, options, *check_seed(seed, offset), return_lse
    return _run(arguments, (score_mod, mask_mod), (q_descale, k_descale, v_descale, out_dtype), kept)


def dropout_mask(shape: tuple[int, int, int, int], dropout_p: float, seed: int, offset: int = 0) -> Any:
    """Which scores dropout keeps: a NumPy bool array of shape (batch, heads_q, seq_q, seq_kv).

    The same for every backend and kernel; a packed problem counts i and j inside each sequence.
    """
    import numpy

    keeps = numpy.empty(shape, dtype=numpy.bool_)
    if keeps.ndim != 4:
        raise ValueError(f"shape: got {tuple(shape)}; expected (batch, heads_q, seq_q, seq_kv)")
    _core.fill_dropout_mask(keeps, *check_seed(seed, offset), dropout_p)
    return keeps


def _bare_masks(mask, hidden_rows, block_mask):
    from flash_attention.masks.prepared import bare_masks

    return bare_masks(mask, hidden_rows, block_mask)


def _run(arguments, functions, of_narrow, kept):
    """By the function that runs such a call. `of_narrow`: descales and out_dtype, of 8-bit tensors. `kept`: where prepared
    masks are."""
    q = arguments[0].q
    has_program = functions[0] is not None or functions[1] is not None
    narrow = _is_narrow(q, *of_narrow)
    if has_program and narrow:
        raise NotImplementedError("score_mod, mask_mod: 8-bit tensors take neither")
    if functions[1] is not None or is_tracing():  # not all masks are prepared, or others do it: torch.compile's graph
        kept = None
    if has_program:
        return _run_program()(*arguments, *functions, kept)
    if kept is not None and not narrow:
        return _run_prepared()(*arguments, kept)
    return _run_narrow()(*arguments, *of_narrow) if narrow else _run_of(q)(*arguments)


def _is_narrow(q, q_descale, k_descale, v_descale, out_dtype):
    """Whether q is of 8 bits, or something of the call says so."""
    if not (q_descale is k_descale is v_descale is out_dtype is None):
        return True
    size = getattr(getattr(q, "dtype", None), "itemsize", 0)  # torch.fx's stand-ins have no number
    return isinstance(size, int) and size == 1


def _run_narrow():
    from flash_attention.pytorch import narrow as torch_narrow

    return torch_narrow.run


def _run_of(q):
    if is_tracing():
        return _find_run(type(q))
    run = _runs.get(type(q))
    if run is None:
        run = _runs[type(q)] = _find_run(type(q))
    return run


def _find_run(kind):
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        if library in _LIBRARIES:
            return _LIBRARIES[library]()
    from flash_attention import any_array

    if any_array.is_array(kind):
        return any_array.run
    raise TypeError(
        f"q: expected a tensor of torch, NumPy, CuPy or JAX, or one with __dlpack__ or __cuda_array_interface__, "
        f"got {kind.__name__}"
    )
