"""flash_attn.modules: mha alone. Blocks, embeddings and MLPs are no attention."""
