"""flash_attn.modules: only mha. Blocks, embeddings and MLPs are not attention."""
