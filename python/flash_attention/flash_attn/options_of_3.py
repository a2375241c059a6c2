"""FlashAttention-3's keywords that choose an implementation, and those that are not served."""

# Hints, and options that change results: name -> its neutral value.
_HINTS = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata")
_NEUTRAL = {"qv": None, "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0}


def check_options_of_3(keywords):
    for name, value in keywords.items():
        if name in _HINTS:
            continue
        if name not in _NEUTRAL:
            raise TypeError(f"{name}: is not an argument of FlashAttention-2 or FlashAttention-3")
        if value is not _NEUTRAL[name] and (_NEUTRAL[name] is None or value != _NEUTRAL[name]):
            raise NotImplementedError(f"{name}: got a value; only {_NEUTRAL[name]} is supported")
