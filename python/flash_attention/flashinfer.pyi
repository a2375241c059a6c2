from flash_attention.compat.flashinfer import *
