"""The parts of FlashAttention-2's `layers` that belong to attention."""
