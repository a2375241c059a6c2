"""Hugging Face transformers: AutoModel.from_pretrained(..., attn_implementation="exact_attention")."""

import functools
import sys

import torch

from flash_attention.arguments.head_dim import padded
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.hugging_face_masks import LazyMask, make_mask

# transformers treats a name with "flash" as FlashAttention-2 and similar: it sends some models to its own kernel, and
# refuses chunked attention. "exact_attention" avoids that. But its continuous batching requires "flash" in the name, and
# passes page tables if a 2 or 3 follows.
NAMES = ("flash_attention", "exact_attention", "exact_flash_3")


def register_transformers(*, flex: bool = False, invariant: bool | None = None, **wrong) -> None:
    """Makes attn_implementation="exact_attention", "flash_attention" and "exact_flash_3" known to transformers.

        flash_attention.register_transformers()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="exact_attention")

    With flex=True this library also replaces torch's FlexAttention: attn_implementation="flex_attention", with the
    BlockMask that transformers makes for it.

    With invariant=True a token has the same bits, and a sequence the same gradients, whatever else is in the batch
    (docs/numerics.md, "Invariant bits"). None follows FLASH_ATTENTION_INVARIANT. It holds until the next registration.
    """
    if wrong:
        refuse_keywords(register_transformers, wrong)
    from transformers import AttentionInterface, AttentionMaskInterface

    if not (invariant is None or isinstance(invariant, bool)):
        raise TypeError(f"invariant: expected a bool or None, got {type(invariant).__name__}")
    forward = _FORWARD[invariant]
    for name in NAMES:
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, make_mask)
    if flex:
        AttentionInterface.register("flex_attention", forward)
    _name_the_source()
    _refuse_models_without_the_interface()


def _name_the_source():
    """Tells transformers the source of the functions, which it wants of any implementation with "flash" in its name."""
    from transformers import modeling_flash_attention_utils as utils

    from flash_attention.compat.flash_attn import (
        bert_padding,
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )

    functions = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    original = getattr(utils, "_lazy_imports", None)
    if original is None or hasattr(original, "answers_for"):
        return

    def lazy_imports(implementation, *arguments, **keywords):
        if implementation not in NAMES:
            return original(implementation, *arguments, **keywords)
        return *functions, bert_padding.pad_input, bert_padding.unpad_input

    lazy_imports.answers_for = NAMES
    utils._lazy_imports = lazy_imports


def _refuse_models_without_the_interface():
    """Such models accept any name, never call its function, and misread its mask."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.get_correct_attn_implementation
    if hasattr(original, "answers_for"):
        return

    @functools.wraps(original)
    def get_correct_attn_implementation(self, requested_attention, *arguments, **keywords):
        if requested_attention in NAMES:
            _check_model(type(self), requested_attention)
        return original(self, requested_attention, *arguments, **keywords)

    get_correct_attn_implementation.answers_for = NAMES
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _check_model(model, name):
    reason = None
    if not (getattr(model, "_supports_sdpa", False) or getattr(model, "_supports_attention_backend", False)):
        reason = "does not use the attention interface of transformers"
    for title, table in vars(sys.modules.get(model.__module__)).items():
        if title.endswith("_ATTENTION_CLASSES") and isinstance(table, dict) and name not in table:
            reason = f"chooses its attention from {title}, which has {', '.join(map(repr, table))} alone"
    if reason is not None:
        raise ValueError(f'attn_implementation: got "{name}"; {model.__name__} {reason}: use "eager"')


def _mask_mod(block_mask):
    """A BlockMask of torch or of this library as one function."""
    from flash_attention.flex.block_mask import mask_mods_of

    (mask_mod,) = mask_mods_of(block_mask)
    return mask_mod


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
    cache=None,
    invariant=None,
    **kwargs,
):
    """transformers' attention function: [batch, heads, seq, head_dim] each -> (out [batch, seq, heads, head_dim], None).

    A mask includes everything that hides keys, also windows. Without a mask, prefill is causal if the module is.
    cu_seq_lens_q and similar arguments mean that sequences are packed along seq. cache: the pages of continuous batching.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options = {"dropout_p": dropout, "scale": scaling, "softcap": softcap or 0.0, "sink": s_aux}
    options["invariant"] = invariant
    if hasattr(cache, "cache_allocators"):
        more = {**kwargs, "cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=more)
        cu_seq_lens_k, max_length_k = more["cu_seq_lens_k"], more["max_length_k"]
        if more.get("block_table") is not None:
            return _decode_in_pages(query, key, value, more, sliding_window, options), None
        attention_mask = None
    if cu_seq_lens_q is not None and attention_mask is None:
        packed = {"cu_seqlens_q": cu_seq_lens_q, "max_seqlen_q": max_length_q}
        packed |= {"cu_seqlens_kv": cu_seq_lens_k, "max_seqlen_kv": max_length_k}
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        out = padded(q, k, v, packed=packed, causal=causal, window=window, **options)
        return out.unflatten(0, (query.shape[0], -1)), None
    if attention_mask is None:
        options |= {"causal": causal and query.shape[2] > 1, "alignment": "top_left"}
    elif isinstance(attention_mask, LazyMask) and attention_mask.shape[2:] == (query.shape[2], key.shape[2]):
        options |= attention_mask.options
    elif hasattr(attention_mask, "mask_mod"):
        options["mask_mod"] = _mask_mod(attention_mask)
    else:
        attention_mask = attention_mask[..., : key.shape[2]]
        options["mask" if attention_mask.dtype == torch.bool else "bias"] = attention_mask
    if position_bias is not None:
        options["bias"] = position_bias if "bias" not in options else options["bias"] + position_bias
    out = padded(query, key, value, layout="bhsd", **options)
    return out.transpose(1, 2).contiguous(), None


def _decode_in_pages(query, key, value, call, sliding_window, options):
    """One token of each sequence, [1, heads, sequences, head_dim]; its key and value go to the pages of the cache."""
    from flash_attention.compat.flash_attn import flash_attn_with_kvcache

    q, k, v = (tensor[0].transpose(0, 1)[:, None] for tensor in (query, key, value))
    held = call["cu_seq_lens_k"].diff()[: len(q)] - 1
    out = flash_attn_with_kvcache(
        q,
        call["k_cache"],
        call["v_cache"],
        k,
        v,
        cache_seqlens=held,
        block_table=call["block_table"],
        softmax_scale=options["scale"],
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=options["softcap"],
        s_aux=options["sink"],
        invariant=options["invariant"],
    )
    return out.transpose(0, 1)


def _invariant_forward(*arguments, **keywords):
    return attention_forward(*arguments, **keywords, invariant=True)


def _variant_forward(*arguments, **keywords):
    return attention_forward(*arguments, **keywords, invariant=False)


_FORWARD = {None: attention_forward, True: _invariant_forward, False: _variant_forward}
