"""The weights that FlashAttention-2 shows its tests: S_dmask."""

import itertools

import torch

from flash_attention.arguments.head_dim import padded
from flash_attention.functional import dropout_mask


@torch.no_grad()
def signed_weights(q, k, seed, packed=None, **options):
    """exp(score - row maximum), [batch, heads, seq_q, seq_k], negative if dropped, 0 if hidden.

    For tests and curiosity: it is as large as the scores, and is computed by attention to slices of the identity matrix.
    """
    if packed is not None:
        q, k, options = _padded_batch(q, k, packed, options)
    dropout_p = options.pop("dropout_p")
    batch, seq_k, heads_k, _ = k.shape
    slices = []
    for columns in torch.eye(seq_k, dtype=q.dtype, device=q.device).split(256, dim=1):
        v = columns[None, :, None, :].repeat(batch, 1, heads_k, 1)
        slices.append(padded(q, k, v, **options))
    weights = torch.cat(slices, dim=-1).transpose(1, 2)
    weights = weights / weights.amax(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    keeps = torch.from_numpy(dropout_mask(weights.shape, dropout_p, seed)).to(weights.device)
    return torch.where(keeps, weights, -weights)


def _padded_batch(q, k, packed, options):
    """The sequences of a packed call as a padded batch, [batch, longest, heads, dim]."""
    used = {}
    rows = []
    for tensor, side in ((q, "q"), (k, "kv")):
        starts = packed[f"cu_seqlens_{side}"].tolist()
        longest = packed[f"max_seqlen_{side}"] or max((b - a for a, b in itertools.pairwise(starts)), default=0)
        batch = tensor.new_zeros((len(starts) - 1, longest, *tensor.shape[1:]))
        for index, (begin, end) in enumerate(itertools.pairwise(starts)):
            batch[index, : end - begin] = tensor[begin:end]
        rows.append(batch)
        given = packed.get(f"seqused_{side}")
        used[f"seqused_{side}"] = packed[f"cu_seqlens_{side}"].diff() if given is None else given
    return *rows, {**options, **used}
