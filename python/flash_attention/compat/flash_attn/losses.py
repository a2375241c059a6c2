"""Refused: flash_attn.losses is not attention."""

raise ImportError(
    "flash_attn.losses: this library computes attention alone; torch.nn.functional.cross_entropy has the same value, and "
    "Liger Kernel's LigerCrossEntropyLoss is a fused one"
)
