"""Parts of FlashAttention-2's `layers` that attention itself needs."""
