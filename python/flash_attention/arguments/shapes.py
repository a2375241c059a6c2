"""Shapes that follow from the tensors of a call, for any library. `tensors` and `scalars` are those of the binding."""


def lse_shape(tensors, scalars):
    """[batch, heads_q, seq_q], or [heads_q, total_q] for a packed call."""
    shape = tensors[0].shape
    if tensors[7] is not None:
        return (shape[1], shape[0])
    return (shape[0], shape[1], shape[2]) if scalars[10] else (shape[0], shape[2], shape[1])


def score_width(tensors, scalars):
    """The last size of a bias or a mask."""
    shape = tensors[1].shape
    if tensors[7] is not None:
        return scalars[1] or shape[0]
    return shape[2] if scalars[10] else shape[1]


# The tensors of a call, in the order of the binding.
NAMES = (
    *("q", "k", "v", "bias", "mask", "alibi_slopes", "sink"),
    *("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "key_lengths", "hidden_rows", "block_mask"),
)


def check_tensors(tensors):
    """Refuses what is no tensor, and q, k, v of a wrong rank, before any result is allocated from their shapes."""
    rank = 3 if tensors[7] is not None else 4
    axes = "[total, heads, head_dim]" if rank == 3 else "[batch, seq, heads, head_dim] or [batch, heads, seq, head_dim]"
    for name, tensor in zip(NAMES, tensors, strict=True):
        needed = name in ("q", "k", "v")
        if (needed or tensor is not None) and not hasattr(tensor, "ndim"):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if needed and tensor.ndim != rank:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}; expected {rank} axes, {axes}")
