"""Hugging Face transformers: AutoModel.from_pretrained(..., attn_implementation="flash_attention")."""

import torch

from flash_attention.head_dim import padded

NAME = "flash_attention"


def register_transformers():
    """Makes attn_implementation="flash_attention" known to transformers, with boolean masks where one is needed.

    flash_attention.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_attention")
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    position_bias=None,
    **kwargs,
):
    """transformers' attention function: [batch, heads, seq, head_dim] each -> (out [batch, seq, heads, head_dim], None).

    A mask holds everything that limits the view, windows too; without one, prefill is causal where the module is.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = bias = None
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
        mask, bias = (attention_mask, None) if attention_mask.dtype == torch.bool else (None, attention_mask)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    out = padded(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
        alignment="top_left",
        dropout_p=dropout,
        scale=scaling,
        softcap=softcap or 0.0,
        sink=s_aux,
        layout="bhsd",
    )
    return out.transpose(1, 2).contiguous(), None
