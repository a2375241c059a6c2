"""Hugging Face transformers: AutoModel.from_pretrained(..., attn_implementation="flash_attention")."""

import torch

from flash_attention.head_dim import padded

NAME = "flash_attention"


def register_transformers() -> None:
    """Makes attn_implementation="flash_attention" known to transformers, with boolean masks where one is needed.

    flash_attention.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_attention")
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    _name_the_source()


def _name_the_source():
    """Answers transformers, which asks where the functions of any implementation with "flash" in its name come from."""
    from transformers import modeling_flash_attention_utils as utils

    from flash_attention.flash_attn import bert_padding, flash_attn_func, flash_attn_varlen_func

    original = getattr(utils, "_lazy_imports", None)
    if original is None or getattr(original, "answers_for", None) == NAME:
        return

    def lazy_imports(implementation, *arguments, **keywords):
        if implementation != NAME:
            return original(implementation, *arguments, **keywords)
        return flash_attn_func, flash_attn_varlen_func, None, bert_padding.pad_input, bert_padding.unpad_input

    lazy_imports.answers_for = NAME
    utils._lazy_imports = lazy_imports


def attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    position_bias=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    **kwargs,
):
    """transformers' attention function: [batch, heads, seq, head_dim] each -> (out [batch, seq, heads, head_dim], None).

    A mask holds everything that limits the view, windows too; without one, prefill is causal where the module is.
    cu_seq_lens_q and its kin say that sequences lie end to end along seq.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options = {"dropout_p": dropout, "scale": scaling, "softcap": softcap or 0.0, "sink": s_aux}
    if cu_seq_lens_q is not None and attention_mask is None:
        packed = {"cu_seqlens_q": cu_seq_lens_q, "max_seqlen_q": max_length_q}
        packed |= {"cu_seqlens_kv": cu_seq_lens_k, "max_seqlen_kv": max_length_k}
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        out = padded(q, k, v, packed=packed, causal=causal, window=window, **options)
        return out.unflatten(0, (query.shape[0], -1)), None
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
        causal=causal and attention_mask is None and query.shape[2] > 1,
        alignment="top_left",
        layout="bhsd",
        **options,
    )
    return out.transpose(1, 2).contiguous(), None
