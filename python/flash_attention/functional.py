"""attention() and attention_packed(): one signature for every tensor library."""

from __future__ import annotations

from flash_attention import _core
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.seeds import check_seed
from flash_attention.routes import route

TYPE_CHECKING = False  # typing costs more to import than the rest of the package
if TYPE_CHECKING:
    from typing import Any, Literal, NoReturn


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
    invariant: bool | None = None,
    tile: tuple[int, int] | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    attention_chunk: int = 0,
    precision: Literal["auto", "ieee", "fast", "tf32"] = "auto",
    return_max_logit: bool = False,
    return_key_mass: bool = False,
    return_entropy: bool = False,
    key_indices: Any = None,
    key_blocks: Any = None,
    key_counts: Any = None,
    key_block_size: tuple[int, int] | None = None,
    **wrong: NoReturn,
) -> Any:
    """softmax(scale * q k^T + ...) v, without ever storing the scores.

        out = attention(q, k, v, causal=True)  # torch, NumPy, CuPy or JAX, [batch, seq, heads, head_dim]

    Differentiable (torch, JAX) in q, k, v, bias and sink, and through the returned lse, key mass and entropy.

    Args:
        q: [batch, seq_q, heads_q, head_dim], float32, float16 or bfloat16, last stride 1, head_dim at most 576,
            fast if a multiple of 8. With layout="bhsd": [batch, heads_q, seq_q, head_dim].
        k: [batch, seq_kv, heads_kv, head_dim]; heads_kv divides heads_q (grouped and multi-query attention).
        v: [batch, seq_kv, heads_kv, head_dim_v]; head_dim_v may differ from head_dim.
        causal: query i sees keys j <= i + seq_kv - seq_q (see alignment).
        window: (left, right), how many keys before and after the diagonal are visible, inclusive; -1 or None = all.
        softcap: cap * tanh(score / cap) if positive.
        alibi_slopes: float32 [heads_q] or [batch, heads_q]; adds -slope * |i + seq_kv - seq_q - j|.
        bias: added to the scores, [batch, heads_q, seq_q, seq_kv] or 1 for any size, leading axes may be left out.
        mask: bool in the same shapes as bias; True = visible.
        hidden_rows: int32 [batch, heads_kv, seq_kv, n], n = 1, 2 or 4; batch and heads may be 1. Key j is hidden from the
            queries [r0, inf), [r0, r1), or [r0, r1) and [r2, r3). Or a mask of flash_attention.masks. docs/masks.md.
        block_mask: which blocks of queries see which blocks of keys: flash_attention.masks.BlockMask, or torch's; or a mask
            of create_block_mask, ours or torch's.
        key_lengths: int32 [batch]; keys from there on are padding. The diagonal stays where seq_kv puts it.
        seqused_q, seqused_kv: int32 [batch]; only that many queries or keys are used, and the diagonal follows.
        sink: [heads_q], one more logit per head in the denominator.
        dropout_p: probability of dropping a weight, in [0, 1).
        seed, offset: of dropout; the mask is a pure function of them. seed=None draws one from the library's generator.
        scale: 1 / sqrt(head_dim) if None.
        layout: "bshd" or "bhsd".
        alignment: "bottom_right", or "top_left", with which query i sees keys j <= i.
        deterministic: the same gradient bits in every run.
        return_lse: also return the logarithm of the sum of exponentials, float32 [batch, heads_q, seq_q].
        kernel: a name from kernels() instead of the planner's choice, for the pass of that kernel; "standard" for the
            textbook algorithm.
        score_mod: score_mod(score, b, h, i, j) -> the score, after all of the above; docs/masks.md (only torch).
        mask_mod: mask_mod(b, h, i, j) -> whether query i sees key j, in addition to all of the above (only torch).
        invariant: a row's bits do not depend on anything else in the call: other sequences, lengths, capacities, pages,
            prefill or decoding. The gradients of a sequence do not depend on what it is packed with. Implies deterministic.
            docs/numerics.md. None follows the environment: FLASH_ATTENTION_INVARIANT=1.
        tile: (queries, keys) of a tile of the GPU's forward kernel, for experiments; refused by name if it does not fit.
        q_descale, k_descale, v_descale: for torch tensors in float8 (all e4m3fn or all e5m2), whose elements have the value
            code * descale: a number, float32 [1] or [batch, heads_kv]; None = 1. quantize() makes them. Forward only.
        out_dtype: of out if q is float8: torch.bfloat16 (None), float16 or float32.
        attention_chunk: a query sees only the keys of its chunk of this many positions, in addition to the rules above
            (query i is at position i + seq_kv - seq_q, see alignment); 0 = all.
        precision: how a GPU multiplies float32. "ieee": in float32. "fast": on tensor cores from sm_80 on, three products
            for one, as exact as float32. "tf32": one product, with 11 bits of each factor. "auto": "fast", or "tf32" if
            torch.get_float32_matmul_precision() allows it (docs/numerics.md). On a CPU, and for other types, all are the
            same.
        key_indices: int32 [batch, seq_q, G, entries], G = 1 or heads_kv: a query sees only the keys of its list, and of
            these only those that the rules above show. A key that is in a list twice counts twice; an entry outside of the
            sequence is not a key. docs/sparse.md.
        key_blocks: int32 [batch, ceil(seq_q / queries), G, entries], G = 1, heads_kv or heads_q: the same for blocks of
            queries and blocks of keys. A block that is in a list twice counts once.
        key_counts: int32, the shape of key_indices or key_blocks without the last axis: later entries are not read.
        key_block_size: (queries, keys) of key_blocks.
        return_max_logit: also return each head's largest score of a visible key, float32 [batch, heads_q], as it enters the
            softmax, without the sink; -inf if no key is visible. It has no gradient (torch, NumPy and CuPy).
        return_key_mass: also return how much attention each key has received, float32 [batch, heads_q, seq_kv]: the sum
            over the queries of the probabilities, before dropout.
        return_entropy: also return each row's entropy, -sum p log p, float32 [batch, heads_q, seq_q]; 0 if it sees no key.

    Returns:
        out, with the layout of q and head_dim_v as last size; or a tuple of out and the requested ones of lse, largest
        score, key mass and entropy, in this order. A row that sees no key is 0, its lse -inf.
    """
    if wrong:
        refuse_keywords(attention, wrong)
    return route()(
        q, k, v, causal, window, softcap, alibi_slopes, bias, mask, hidden_rows, block_mask, key_lengths, seqused_q,
        seqused_kv, sink, dropout_p, seed, offset, scale, layout, alignment, deterministic, return_lse, kernel, score_mod,
        mask_mod, tile, q_descale, (
            k_descale, v_descale, out_dtype, attention_chunk, precision, invariant, return_max_logit, return_key_mass,
            return_entropy, key_indices, key_blocks, key_counts, key_block_size,
        ),
    )  # fmt: skip


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
    invariant: bool | None = None,
    tile: tuple[int, int] | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    attention_chunk: int = 0,
    precision: Literal["auto", "ieee", "fast", "tf32"] = "auto",
    return_max_logit: bool = False,
    return_key_mass: bool = False,
    return_entropy: bool = False,
    key_indices: Any = None,
    key_blocks: Any = None,
    key_counts: Any = None,
    key_block_size: tuple[int, int] | None = None,
    **wrong: NoReturn,
) -> Any:
    """attention() for sequences of different lengths, packed end to end, without padding.

        starts = torch.tensor([0, 5, 16], dtype=torch.int32)  # sequences of 5 and 11 tokens
        out = attention_packed(q[0], k[0], v[0], starts, causal=True)

    Args:
        q: [total_q, heads_q, head_dim].
        k: [total_kv, heads_kv, head_dim].
        v: [total_kv, heads_kv, head_dim_v].
        cu_seqlens_q: int32 [batch + 1]; sequence b is q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]].
        cu_seqlens_kv: int32 [batch + 1]; cu_seqlens_q if None.
        max_seqlen_q, max_seqlen_kv: the longest lengths, or any upper bounds; None = unknown, which is always correct.
        bias, mask: as in attention(), with indices counted within each sequence: sizes up to
            [batch, heads_q, max_seqlen_q, max_seqlen_kv].
        hidden_rows: int32 [heads_kv, total_kv, n]; rows are counted within each sequence.
        block_mask: as in attention(), with blocks counted within each sequence, for max_seqlen_q and max_seqlen_kv.
        key_indices, key_blocks: int32 [total_q, G, entries], with keys or blocks counted within each sequence;
            key_block_size is (1, keys).

    The other arguments are those of attention(). Returns out [total_q, heads_q, head_dim_v], or a tuple as attention() does
    with lse and entropy float32 [heads_q, total_q] and key mass [heads_q, total_kv].
    """
    if wrong:
        refuse_keywords(attention_packed, wrong)
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q: expected int32 [batch + 1], got None")
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
        max_seqlen_kv = max_seqlen_kv or max_seqlen_q
    return route()(
        q, k, v, causal, window, softcap, alibi_slopes, bias, mask, hidden_rows, block_mask, key_lengths, seqused_q,
        seqused_kv, sink, dropout_p, seed, offset, scale, "bshd", alignment, (
            deterministic, return_lse, kernel, score_mod, mask_mod, tile, q_descale, k_descale, v_descale,
            out_dtype, attention_chunk, precision, invariant, return_max_logit, return_key_mass, return_entropy,
            key_indices, key_blocks, key_counts, key_block_size,
        ), cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv,
    )  # fmt: skip


def dropout_mask(shape: tuple[int, int, int, int], dropout_p: float, seed: int, offset: int = 0, **wrong: NoReturn) -> Any:
    """Which scores dropout keeps: a NumPy bool array of shape (batch, heads_q, seq_q, seq_kv).

        kept = dropout_mask((1, 4, 16, 16), dropout_p=0.1, seed=7)

    It is the same for every backend and kernel. In a packed problem i and j are counted within each sequence.
    """
    if wrong:
        refuse_keywords(dropout_mask, wrong)
    import numpy

    keeps = numpy.empty(shape, dtype=numpy.bool_)
    if keeps.ndim != 4:
        raise ValueError(f"shape: got {tuple(shape)}; expected (batch, heads_q, seq_q, seq_kv)")
    _core.fill_dropout_mask(keeps, *check_seed(seed, offset), dropout_p)
    return keeps
