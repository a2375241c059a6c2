from flash_attention.compat.flash_attn import *  # noqa: F403
