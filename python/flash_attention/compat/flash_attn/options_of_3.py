"""FlashAttention-3's keywords: choices of an implementation, options, and those that are not supported."""

from flash_attention.arguments.keywords import refuse_keywords

_HINTS = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata")
_REFUSED = ("qv", "q_descale", "k_descale", "v_descale")  # where a function has no such argument; None is accepted


def options_of_3(function, keywords):
    """attention()'s options for the additional keywords of a function."""
    for name, value in keywords.items():
        if name not in (*_HINTS, *_REFUSED, "attention_chunk"):
            refuse_keywords(function, {name: value})
        if name in _REFUSED and value is not None:
            raise NotImplementedError(f"{name}: got a value; only None is supported")
    chunk = keywords.get("attention_chunk")
    return {"attention_chunk": chunk} if chunk else {}
