from flash_attention.compat.flash_mla import *  # noqa: F403
