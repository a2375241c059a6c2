from flash_attention.compat.flash_attn_4 import *  # noqa: F403
