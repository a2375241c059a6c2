from flash_attention.compat.flash_attn_3 import *  # noqa: F403
