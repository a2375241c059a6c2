"""A keyword that a function does not have: the error says what the function calls it.

Public functions end with `**wrong: NoReturn`: type checkers refuse any other keyword as before, and a right call pays for
an empty dict. A wrapper around each function would cost more, and hide its signature.
"""

TYPE_CHECKING = False  # typing costs more to import than the rest of the package
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# Names of one thing, in this library and in others.
_SAME = (
    ("causal", "is_causal", "use_causal_mask", "casual", "casaul"),
    ("scale", "softmax_scale", "sm_scale", "scaling", "qk_scale", "sm_scaling"),
    ("window", "window_size", "sliding_window", "sliding_window_size", "local_window_size", "window_left"),
    ("mask", "bias", "attn_mask", "attention_mask", "attn_bias", "custom_mask", "startend_row_indices"),
    ("key_lengths", "key_padding_mask", "key_padding_lengths", "key_value_seq_lengths"),
    ("dropout_p", "dropout", "dropout_rate", "attention_dropout", "p"),
    ("softcap", "soft_cap", "logits_soft_cap", "logit_softcap", "attn_logit_softcapping"),
    ("alibi_slopes", "alibi", "slopes"),
    ("sink", "sinks", "s_aux", "learnable_sink", "attention_sink"),
    ("seqused_kv", "seqused_k", "cache_seqlens", "kv_lengths", "context_lens", "cache_lengths"),
    ("page_table", "block_table", "block_tables", "kv_page_table"),
    ("cu_seqlens_q", "cu_seqlens", "cu_seq_lens_q", "qo_indptr"),
    ("cu_seqlens_kv", "cu_seqlens_k", "cu_seq_lens_k", "kv_indptr"),
    ("max_seqlen_q", "max_length_q", "max_q_len", "max_seqlen"),
    ("max_seqlen_kv", "max_seqlen_k", "max_length_k"),
    ("return_lse", "return_softmax_lse", "return_residual", "return_attn_probs", "return_aux"),
    ("attention_chunk", "chunk_size", "attention_chunk_size"),
    ("layout", "tensor_layout", "kv_layout", "head_first", "heads_first", "qkv_format"),
    ("k_scale", "k_descale"),
    ("v_scale", "v_descale"),
    ("q", "query", "queries"),
    ("k", "key", "keys"),
    ("v", "value", "values"),
)
# What has no name here because nothing is to be said.
_NEEDLESS = {
    "enable_gqa": "k and v may have fewer heads than q as they are",
    "need_weights": "the weights are never stored",
    "is_training": "a backward pass runs where a tensor requires a gradient",
}


def refuse_keywords(function: "Callable[..., Any]", wrong: "dict[str, Any]") -> "NoReturn":
    """Raises the TypeError for the first of these keywords."""
    import inspect

    kinds = inspect.Parameter
    taken = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    ]
    name = next(iter(wrong))
    raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'{advice(name, taken)}")


def advice(name: str, taken: "list[str]") -> str:
    """The end of that sentence, for a function with these arguments."""
    same = [known for group in _SAME if name in group for known in group if known in taken]
    if not same:
        import difflib

        spelled = [known for group in _SAME for known in group]
        near = difflib.get_close_matches(name, taken, 1, 0.75) or [
            known
            for other in difflib.get_close_matches(name, spelled, 1, 0.75)
            for group in _SAME
            if other in group
            for known in group
            if known in taken
        ]
        same = near
    if same:
        return f"; it is called {' or '.join(same)} here"
    if name in _NEEDLESS:
        return f"; it is not needed: {_NEEDLESS[name]}"
    return f"{_elsewhere(name, taken)}; there are {', '.join(taken)}"


def _elsewhere(name: str, taken: "list[str]") -> str:
    """What attention() calls an option that this function, which attends, does not have."""
    from flash_attention.functional import attention

    options = attention.__kwdefaults__
    found = [known for group in _SAME if name in group for known in group if known in options]
    found = found or [known for known in options if known == name]
    if not found or not {"q", "query", "qkv"} & set(taken):
        return ""
    return f"; flash_attention.attention() has {' and '.join(found)}"
