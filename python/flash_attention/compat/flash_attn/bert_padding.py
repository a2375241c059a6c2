"""Converts padded batches to sequences end to end, and back: FlashAttention-2's bert_padding."""

import torch
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drops the padding.

    Args:
        hidden_states: [batch, seq, ...].
        attention_mask: bool or int [batch, seq]; nonzero = a token.
        unused_mask: the same, for tokens that are kept but do not count.

    Returns:
        hidden_states [total, ...], indices int64 [total] of its rows in the flattened batch, cu_seqlens int32 [batch + 1],
        max_seqlen (int), and seqused int32 [batch], the tokens of each sequence that count.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.ne(0).sum(dim=-1, dtype=torch.int32)
    indices = kept.ne(0).flatten().nonzero(as_tuple=True)[0]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    seqused = attention_mask.ne(0).sum(dim=-1, dtype=torch.int32)
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Drops the padding of rows that hold several sequences one after another.

    Args:
        hidden_states: [batch, seq, ...].
        attention_mask_in_length: int [batch, seq]; the nonzero entries of a row are the lengths of its sequences, in order.
            [[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]]: the first row holds 2 and 3 tokens and one of padding, the second 6.

    Returns:
        hidden_states [total, ...], indices int64 [total] of its rows in the flattened batch, cu_seqlens int32
        [sequences + 1], and the longest length (int).
    """
    used = attention_mask_in_length.sum(dim=-1, keepdim=True)
    kept = torch.arange(hidden_states.shape[1], device=used.device) < used
    indices = kept.flatten().nonzero(as_tuple=True)[0]
    lengths = attention_mask_in_length[attention_mask_in_length != 0].to(torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts rows [total, ...] back to [batch, seqlen, ...], zeros where there was padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices], for x [rows, ...]."""
    return x.index_select(0, indices)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(x[indices], x): the rows for a layer, and all rows for the residual connection."""
    return index_first_axis(x, indices), x


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with values in the rows `indices`."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)
