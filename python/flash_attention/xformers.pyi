from flash_attention.compat.xformers import *  # noqa: F403
