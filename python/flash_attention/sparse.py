"""Selecting the keys that a query attends to: the best by an indexer's scores, the best blocks, the indexer's loss.

    from flash_attention import attention, sparse
    keys = sparse.select_keys(index_q, index_k, index_weights, 512)  # int32 [batch, seq_q, 1, 512]
    out, lse = attention(q, k, v, causal=True, key_indices=keys, return_lse=True)
    scores = sparse.indexer_scores(index_q, index_k, index_weights, keys)
    loss = sparse.indexer_loss(scores, keys, q, k, lse=lse)

Every function processes some queries at a time, so its memory grows with the lists, never with queries times keys. They
run wherever torch runs. docs/sparse.md shows a whole step; docs/numerics.md, "Selection", has the formulas.
"""

import math
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords

__all__ = ["block_scores", "indexer_loss", "indexer_scores", "select_blocks", "select_keys"]

# Bytes of the largest temporary tensor, by device: enough for efficient products, little beside the tensors of a layer.
_TEMPORARY = {"cpu": 8 << 20, "cuda": 256 << 20}
_KEYS_AT_A_TIME = 4096
_NO_KEY = -(2**63)


def select_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    causal: bool = True,
    seqused_kv: Tensor | None = None,
    **wrong: NoReturn,
) -> Tensor:
    """The keys with the largest indexer scores, for each query, in the form of attention()'s key_indices.

    The score of key j for query i is  sum over h of weights[i, h] * max(q[i, h] . k[j], 0),  in float32.

        keys = select_keys(torch.randn(1, 64, 4, 32), torch.randn(1, 64, 32), torch.rand(1, 64, 4), 16)

    Args:
        q: the indexer's queries, [batch, seq_q, heads, dim].
        k: the indexer's keys, one head, [batch, seq_kv, dim].
        weights: of the indexer's heads, [batch, seq_q, heads].
        topk: entries of each list.
        causal: query i sees keys up to i + seq_kv - seq_q (with seqused_kv instead of seq_kv if given).
        seqused_kv: int32 [batch]; keys in use. All if None.

    Returns:
        int32 [batch, seq_q, 1, topk], the best key first. Of equal scores the lower index is first; NaN is before all
        others. Entries are -1 if a query sees fewer keys. It has no gradients; indexer_scores() has.
    """
    if wrong:
        refuse_keywords(select_keys, wrong)
    _check_indexer(q, k, weights)
    _check_topk(topk)
    batch, seq_q, heads, _ = q.shape
    if seqused_kv is not None and seqused_kv.shape != (batch,):
        raise ValueError(f"seqused_kv: got shape {list(seqused_kv.shape)}; expected [{batch}], the batch")
    lists = torch.empty(batch, seq_q, 1, topk, dtype=torch.int32, device=q.device)
    keys_at_a_time = min(_KEYS_AT_A_TIME, max(k.shape[1], 1))
    with torch.no_grad():
        for b in range(batch):
            # Lengths stay on the device. Without them keys behind the diagonal are skipped; with them they are hidden.
            used = k.shape[1] if seqused_kv is None else seqused_kv[b].clamp(0, k.shape[1])
            for rows in _chunks(seq_q, heads * keys_at_a_time * 4, q.device):
                last = k.shape[1] if seqused_kv is not None or not causal else max(0, rows.stop + k.shape[1] - seq_q)
                best = torch.full((rows.stop - rows.start, topk), _NO_KEY, dtype=torch.int64, device=q.device)
                for begin in range(0, last, keys_at_a_time):
                    keys = slice(begin, min(begin + keys_at_a_time, last))
                    scores = _dots(q[b, rows], k[b, keys]).relu_()
                    scores = torch.einsum("qhj,qh->qj", scores, weights[b, rows].float())
                    ranks = _ranks(scores, begin)
                    ranks.masked_fill_(_hidden(rows, keys, used, seq_q, causal, q.device), _NO_KEY)
                    best = _best(torch.cat((best, ranks), 1), topk)
                lists[b, rows, 0] = _entries(best)
    return lists


def indexer_scores(q: Tensor, k: Tensor, weights: Tensor, key_indices: Tensor, **wrong: NoReturn) -> Tensor:
    """The indexer's scores of the keys of each list, float32 [batch, seq_q, 1, entries]; -inf for entries that are no key.

    The score is that of select_keys(). Differentiable in q, k and weights; only the lists are kept for the backward pass.

        keys = torch.randint(0, 64, (1, 64, 1, 16), dtype=torch.int32)
        scores = indexer_scores(torch.randn(1, 64, 4, 32), torch.randn(1, 64, 32), torch.rand(1, 64, 4), keys)

    Args:
        q, k, weights: as in select_keys().
        key_indices: int32 [batch, seq_q, 1, entries].
    """
    if wrong:
        refuse_keywords(indexer_scores, wrong)
    _check_indexer(q, k, weights)
    _check_lists(key_indices, q)
    return _IndexerScores.apply(q, k, weights, key_indices)


def indexer_loss(
    scores: Tensor,
    key_indices: Tensor,
    q: Tensor,
    k: Tensor,
    *,
    lse: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    reduction: str = "mean",
    **wrong: NoReturn,
) -> Tensor:
    """The distance of the indexer from the attention over its selection: KL(target || softmax(scores)) over each list.

    The target of a query is the attention's probability of each listed key, summed over its heads and divided by the
    sum over the list. It is a constant: only `scores` gets a gradient, softmax(scores) - target.

        q, k = torch.randn(1, 64, 8, 32), torch.randn(1, 64, 2, 32)
        keys = torch.randint(0, 64, (1, 64, 1, 16), dtype=torch.int32)
        loss = indexer_loss(torch.randn(1, 64, 1, 16), keys, q, k)

    Args:
        scores: of indexer_scores(), float32 [batch, seq_q, 1, entries].
        key_indices: the same lists, int32.
        q, k: the attention's queries and keys, [batch, seq_q, heads_q, head_dim] and [batch, seq_kv, heads_kv, head_dim].
        lse: from attention(), float32 [batch, heads_q, seq_q]. With it a sink takes its share of each head's weight;
            without it each head's probabilities over the list sum to 1.
        scale: of the attention's scores; default 1 / sqrt(head_dim).
        causal: keys after the query do not count, bottom-right as in attention().
        reduction: "mean" over the queries that see a key, "sum", or "none" for float32 [batch, seq_q].
    """
    if wrong:
        refuse_keywords(indexer_loss, wrong)
    _check_attention(q, k)
    _check_lists(key_indices, q)
    if scores.shape != key_indices.shape:
        raise ValueError(f"scores: got shape {list(scores.shape)}; expected that of key_indices, {list(key_indices.shape)}")
    if lse is not None and lse.shape != (q.shape[0], q.shape[2], q.shape[1]):
        raise ValueError(
            f"lse: got shape {list(lse.shape)}; expected {[q.shape[0], q.shape[2], q.shape[1]]}, [batch, heads_q, seq_q]"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: got {reduction!r}; allowed are 'mean', 'sum' and 'none'")
    target = _target(key_indices, q, k, lse, 1 / math.sqrt(q.shape[3]) if scale is None else scale, causal)
    listed = target.sum(-1) > 0
    # -inf of an entry that is no key would make NaN of 0 * -inf, in the loss and in its gradient
    logits = scores[:, :, 0].float().masked_fill(~_is_key(key_indices[:, :, 0], q, k, causal), -torch.inf)
    logits = torch.where(listed[..., None], logits, 0)
    predicted = torch.log_softmax(logits, -1)
    predicted = torch.where(torch.isneginf(logits), 0, predicted)
    rows = (torch.special.xlogy(target, target) - target * predicted).sum(-1)
    rows = torch.where(listed, rows, 0)
    if reduction == "none":
        return rows
    return rows.sum() / listed.sum().clamp(min=1) if reduction == "mean" else rows.sum()


def block_scores(
    q: Tensor,
    k: Tensor,
    key_block_size: tuple[int, int],
    *,
    groups: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    **wrong: NoReturn,
) -> Tensor:
    """Scores of blocks of keys by their mean key, float32 [batch, blocks of queries, groups, blocks of keys].

    scale * (mean of the queries of a block and the heads of a group) . (mean of the keys of a block). If causal hides a
    block of keys from every query of a block, its score is -inf. Differentiable.

        scores = block_scores(torch.randn(1, 64, 8, 32), torch.randn(1, 64, 2, 32), (1, 16))

    Args:
        q: [batch, seq_q, heads_q, head_dim].
        k: [batch, seq_kv, heads_kv, head_dim].
        key_block_size: (queries, keys) of a block.
        groups: lists of a query: heads_kv (the default), heads_q, or 1 for one list for all heads.
        scale: default 1 / sqrt(head_dim).
        causal: bottom-right, as in attention().
    """
    if wrong:
        refuse_keywords(block_scores, wrong)
    _check_attention(q, k)
    queries, keys = _checked_block_size(key_block_size)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    rows, columns = _pooled(q, k, queries, keys, _checked_groups(groups, q, k))
    scores = torch.einsum("bigd,bjgd->bigj", rows, columns) * scale
    if causal:
        units = slice(0, rows.shape[1])
        hidden = _blocks_hidden(units, scores.shape[3], (queries, keys), q.shape[1], k.shape[1], q.device)
        scores = scores.masked_fill(hidden[None, :, None], -torch.inf)
    return scores


def select_blocks(
    q: Tensor,
    k: Tensor,
    topk: int,
    key_block_size: tuple[int, int],
    *,
    groups: int | None = None,
    causal: bool = True,
    first: int = 0,
    last: int = 1,
    **wrong: NoReturn,
) -> Tensor:
    """The blocks of keys with the largest block_scores(), in the form of attention()'s key_blocks.

        blocks = select_blocks(q, k, 2, (1, 4))
        out = attention(q, k, v, causal=True, key_blocks=blocks, key_block_size=(1, 4))

    Args:
        q, k, key_block_size, groups, causal: as in block_scores().
        topk: entries of each list, including first and last.
        first: this many blocks at the beginning are always listed.
        last: this many blocks up to the last visible one (the query's own, if causal) are always listed.

    Returns:
        int32 [batch, blocks of queries, groups, topk]: blocks that are always listed, by index, then the best. Of equal
        scores the lower index is first. Entries are -1 if fewer blocks are visible.
    """
    if wrong:
        refuse_keywords(select_blocks, wrong)
    _check_attention(q, k)
    _check_topk(topk)
    queries, keys = _checked_block_size(key_block_size)
    for name, value in (("first", first), ("last", last)):
        if value < 0:
            raise ValueError(f"{name}: got {value}; allowed are 0 and more")
    if first + last > topk:
        raise ValueError(f"first + last: got {first} + {last}; a list has {topk} entries (topk)")
    with torch.no_grad():
        rows, columns = _pooled(q, k, queries, keys, _checked_groups(groups, q, k))
        batch, units, lists_of_query, _ = rows.shape
        blocks = columns.shape[1]
        lists = torch.empty(batch, units, lists_of_query, topk, dtype=torch.int32, device=q.device)
        number = torch.arange(blocks, device=q.device)
        for b in range(batch):
            for some in _chunks(units, lists_of_query * max(blocks, 1) * 8, q.device):
                scores = torch.einsum("igd,jgd->igj", rows[b, some], columns[b])
                hidden = torch.zeros(some.stop - some.start, blocks, dtype=torch.bool, device=q.device)
                if causal:
                    hidden = _blocks_hidden(some, blocks, (queries, keys), q.shape[1], k.shape[1], q.device)
                visible = blocks - hidden.sum(-1, keepdim=True)  # hidden ones are the last
                always = ((number < first) | (number >= visible - last)) & ~hidden
                # those are above every score, a NaN's too, in the order of their index
                ranks = torch.where(always[:, None], 2**63 - 1 - number, _ranks(scores, 0))
                ranks.masked_fill_(hidden[:, None], _NO_KEY)
                ranks = torch.nn.functional.pad(ranks, (0, max(0, topk - blocks)), value=_NO_KEY)
                best = _best(ranks.flatten(0, 1), topk).unflatten(0, (-1, lists_of_query))
                # what a rank says of a block that is always listed is not its index
                listed = (always.sum(-1)[:, None, None] > torch.arange(topk, device=q.device)).expand_as(best)
                lists[b, some] = torch.where(listed, (2**63 - 1 - best).int(), _entries(best))
    return lists


class _IndexerScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weights: Tensor, key_indices: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, weights, key_indices)
        scores = torch.full(key_indices.shape, -torch.inf, dtype=torch.float32, device=q.device)
        for b, rows, entries, is_key in _rows_of_lists(key_indices, k, q.shape[2]):
            dots = _listed_dots(q[b, rows], k[b], entries)
            some = torch.einsum("qht,qh->qt", dots.relu_(), weights[b, rows].float())
            scores[b, rows, 0] = some.masked_fill_(~is_key, -torch.inf)
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weights, key_indices = ctx.saved_tensors
        dq, dk, dweights = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, weights))
        for b, rows, entries, is_key in _rows_of_lists(key_indices, k, q.shape[2]):
            dots = _listed_dots(q[b, rows], k[b], entries)
            gradient = dscores[b, rows, 0].float().masked_fill(~is_key, 0)
            dweights[b, rows] = torch.einsum("qht,qt->qh", dots.relu(), gradient)
            ddots = (dots > 0) * (weights[b, rows].float()[:, :, None] * gradient[:, None])
            keys = k[b].float()[entries]
            dq[b, rows] = torch.einsum("qht,qtd->qhd", ddots, keys)
            dkeys = torch.einsum("qht,qhd->qtd", ddots, q[b, rows].float())
            dk[b].index_add_(0, entries.flatten(), dkeys.masked_fill_(~is_key[..., None], 0).flatten(0, 1))
        return dq.to(q.dtype), dk.to(k.dtype), dweights.to(weights.dtype), None


def _target(key_indices, q, k, lse, scale, causal):
    """[batch, seq_q, entries]: the attention's distribution over each list; 0 if a query sees no key of it."""
    batch, seq_q, heads, _ = q.shape
    heads_kv = k.shape[2]
    target = torch.zeros(batch, seq_q, key_indices.shape[3], dtype=torch.float32, device=q.device)
    seen = _is_key(key_indices[:, :, 0], q, k, causal)
    with torch.no_grad():
        for b, rows, entries, _ in _rows_of_lists(key_indices, k, heads):
            grouped = q[b, rows].unflatten(1, (heads_kv, -1)).flatten(0, 1)  # [queries * heads_kv, group, head_dim]
            keys = k[b][entries].permute(0, 2, 3, 1).flatten(0, 1)
            scores = _products(grouped, keys).view(-1, heads, entries.shape[1]) * scale
            scores = scores.masked_fill_(~seen[b, rows, None], -torch.inf)
            most = scores.amax(-1, keepdim=True) if lse is None else lse[b, :, rows].T[..., None].float()
            weight = torch.exp(scores - torch.where(torch.isfinite(most), most, 0))
            if lse is None:
                weight /= weight.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            weight = weight.sum(1)
            target[b, rows] = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return target


def _is_key(entries, q, k, causal):
    """Which entries [batch, seq_q, entries] are keys that the query sees."""
    seen = (entries >= 0) & (entries < k.shape[1])
    if causal:
        seen &= entries <= torch.arange(q.shape[1], device=q.device)[:, None] + (k.shape[1] - q.shape[1])
    return seen


def _rows_of_lists(key_indices, k, heads) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Sequence, some of its queries, their entries (0 if there is no key) and which entries are keys."""
    seq_kv, wide = k.shape[1], math.prod(k.shape[2:])
    if seq_kv == 0:
        return
    for b in range(key_indices.shape[0]):
        for rows in _chunks(key_indices.shape[1], key_indices.shape[3] * max(wide, heads) * 4, key_indices.device):
            entries = key_indices[b, rows, 0]
            is_key = (entries >= 0) & (entries < seq_kv)
            yield b, rows, torch.where(is_key, entries, 0).long(), is_key


def _chunks(rows, bytes_of_row, device) -> Iterator[slice]:
    step = max(1, _TEMPORARY.get(device.type, _TEMPORARY["cuda"]) // max(bytes_of_row, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def _dots(q, k):
    """[queries, heads, keys] in float32, of [queries, heads, dim] and [keys, dim]."""
    return _products(q.flatten(0, 1)[None], k.T[None])[0].unflatten(0, q.shape[:2])


def _listed_dots(q, k, entries):
    """[queries, heads, entries] in float32: the products with the keys of each query's own list."""
    return _products(q, k[entries].transpose(1, 2))


def _products(a, b):
    """Batched products in float32. Tensor cores multiply 16-bit numbers exactly, and sum in float32."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _hidden(rows, keys, used, seq_q, causal, device):
    """[queries, keys] of these: the query does not see the key."""
    last = torch.arange(rows.start, rows.stop, device=device)[:, None] + (used - seq_q) if causal else used - 1
    return torch.arange(keys.start, keys.stop, device=device) > last


def _blocks_hidden(some, blocks, size, seq_q, seq_kv, device):
    """[blocks of queries, blocks of keys]: the causal mask hides the whole block of keys from the block of queries."""
    queries, keys = size
    units = torch.arange(some.start, some.stop, device=device)
    last = (units * queries + queries - 1).clamp(max=seq_q - 1) + (seq_kv - seq_q)
    return torch.arange(blocks, device=device) * keys > last[:, None]


def _ranks(scores, begin):
    """int64 numbers in the order of the scores, NaN highest, equal scores by the lower key: 32 bits of score, 32 of key."""
    bits = torch.where(scores.isnan(), torch.nan, scores + 0.0).view(torch.int32).long()  # + 0.0: -0 equals 0
    bits = torch.where(bits < 0, -(2**31) - 1 - bits, bits)
    key = torch.arange(begin, begin + scores.shape[-1], device=scores.device)
    return (bits << 32) + (2**32 - 1 - key)


def _best(ranks, topk):
    """[rows, topk]: the largest, in order."""
    return torch.topk(ranks, topk, dim=-1, sorted=True).values


def _entries(ranks):
    return torch.where(ranks == _NO_KEY, -1, 2**32 - 1 - (ranks & (2**32 - 1))).int()


def _pooled(q, k, queries, keys, groups):
    """Means over a block and the heads of a group, of q and of k: [batch, blocks, groups, dim]."""
    heads_kv = k.shape[2]
    rows = _block_means(q.float().unflatten(2, (groups, -1)).mean(3), queries)
    columns = _block_means(k.float(), keys)
    if groups == 1:
        columns = columns.mean(2, keepdim=True)
    elif groups != heads_kv:
        columns = columns.repeat_interleave(groups // heads_kv, 2)
    return rows, columns


def _block_means(x, size):
    rest = -x.shape[1] % size
    blocks = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rest)).unflatten(1, (-1, size)).sum(2)
    held = torch.full((blocks.shape[1],), float(size), device=x.device)
    if rest:
        held[-1] = size - rest
    return blocks / held[:, None, None]


def _check_indexer(q, k, weights):
    for name, tensor, axes in (
        ("q", q, "[batch, seq_q, heads, dim]"),
        ("k", k, "[batch, seq_kv, dim]"),
        ("weights", weights, "[batch, seq_q, heads]"),
    ):
        _check_tensor(name, tensor, axes)
    if k.shape[0] != q.shape[0] or k.shape[2] != q.shape[3]:
        raise ValueError(f"k: got shape {list(k.shape)}; expected [{q.shape[0]}, seq_kv, {q.shape[3]}], as q has")
    if weights.shape != q.shape[:3]:
        raise ValueError(f"weights: got shape {list(weights.shape)}; expected {list(q.shape[:3])}, as q has")


def _check_attention(q, k):
    _check_tensor("q", q, "[batch, seq_q, heads_q, head_dim]")
    _check_tensor("k", k, "[batch, seq_kv, heads_kv, head_dim]")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or not k.shape[2] or q.shape[2] % k.shape[2]:
        allowed = f"[{q.shape[0]}, seq_kv, heads_kv, {q.shape[3]}], heads_kv a divisor of {q.shape[2]}"
        raise ValueError(f"k: got shape {list(k.shape)}; expected {allowed}")


def _check_tensor(name, tensor, axes):
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor of torch, got {type(tensor).__name__}")
    if tensor.dim() != axes.count(",") + 1:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}; expected {axes}")


def _check_lists(key_indices, q):
    _check_tensor("key_indices", key_indices, "[batch, seq_q, 1, entries]")
    if key_indices.dtype != torch.int32:
        raise TypeError(f"key_indices: got {key_indices.dtype}; expected torch.int32 (.int())")
    if key_indices.shape[:3] != (*q.shape[:2], 1):
        raise ValueError(
            f"key_indices: got shape {list(key_indices.shape)}; expected [{q.shape[0]}, {q.shape[1]}, 1, entries]"
        )


def _check_topk(topk):
    if not isinstance(topk, int) or topk < 1:
        raise ValueError(f"topk: got {topk!r}; allowed are whole numbers from 1 on")


def _checked_block_size(size):
    if len(size) != 2 or min(size) < 1:
        raise ValueError(f"key_block_size: got {size}; expected (queries, keys), each at least 1")
    return size


def _checked_groups(groups, q, k):
    groups = k.shape[2] if groups is None else groups
    if groups not in (1, k.shape[2], q.shape[2]):
        raise ValueError(f"groups: got {groups}; allowed are 1, heads_kv ({k.shape[2]}) and heads_q ({q.shape[2]})")
    return groups
