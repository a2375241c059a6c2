from flash_attention.compat.flashinfer import *  # noqa: F403
