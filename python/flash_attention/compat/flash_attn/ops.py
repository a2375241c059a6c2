"""Refused: flash_attn.ops is not attention."""

raise ImportError(
    "flash_attn.ops: this library computes attention alone; torch.nn.RMSNorm and LayerNorm have the same values, and "
    "torch.compile or Liger Kernel fuse them"
)
