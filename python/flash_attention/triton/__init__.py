"""Attention in Triton: the same mathematics as the CUDA kernels in a few hundred lines of Python.

    from flash_attention.triton import attention
    out = attention(q, k, v, causal=True)          # [batch, seq, heads, head_dim], fp16 or bf16, differentiable

`python -m flash_attention.triton` checks it against PyTorch. Without a GPU the kernels run in Triton's interpreter.
"""

import os
import sys

import torch

# Triton reads the variable when it is first imported; set later, only some functions would be interpreted.
if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from .attention import attention

__all__ = ["attention"]
