"""Masks of transformers by their parts: a window, chunks, lengths, the padding of the keys. No part is [seq, seq].

transformers describes a mask by functions of indices, and an implementation makes its own mask of them. Functions that are
known here (causal, windows, chunks, padding) become a LazyMask. Any other function becomes the dense mask of "sdpa", and a
warning names it.
"""

import warnings

import torch

_NEEDED = {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask"}
_told = set()


class LazyMask(torch.Tensor):
    """A bool tensor [batch, 1, seq_q, seq_kv] without elements: `options` for attention(), and dense(), the elements.

    If a model does anything to it except to pass it on, that is done to the dense mask.
    """

    @staticmethod
    def __new__(cls, shape, device, options, dense):
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.options, mask.dense = options, dense
        return mask

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(value):
            return value.dense() if isinstance(value, LazyMask) else value

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, **unused):
        return f"LazyMask({list(self.shape)}, {self.options})"


def make_mask(*positional, **arguments):
    """The mask function that transformers calls: a LazyMask, a dense mask, or None if only causality hides keys."""
    from transformers.masking_utils import sdpa_mask

    # While compiling nothing else is tested: dynamo of torch 2.9 cannot compare sets.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or positional or not arguments.keys() >= _NEEDED:
        return sdpa_mask(*positional, **arguments)
    bounds = _bounds(arguments["mask_function"])
    if isinstance(bounds, str):
        tell_once(bounds, f"the mask {bounds!r} of transformers has no short form here: it is made [seq_q, seq_kv]")
        return sdpa_mask(**arguments)
    q_length, kv_length = arguments["q_length"], arguments["kv_length"]
    causal_skip = arguments.get("allow_is_causal_skip", True)
    if q_length == 1 and not causal_skip:  # it goes to a compiled step, and one row is short
        return sdpa_mask(**arguments)
    left, right, chunk = bounds
    start = int(arguments["kv_offset"])
    diagonal = int(arguments["q_offset"]) - start  # query i stands at key i + diagonal
    end = diagonal + q_length if right == 0 else kv_length
    aligned = diagonal + q_length == kv_length or (left < 0 and right < 0 and not chunk)
    if not 0 <= end <= kv_length or not (aligned or right == 0):
        tell_once("offset", "a mask of transformers whose diagonal is beyond the keys is made [seq_q, seq_kv]")
        return sdpa_mask(**arguments)
    device = arguments.get("device", "cpu")
    options = _padding(arguments["attention_mask"], start, end, kv_length)
    if left >= end - 1:
        left = -1
    if chunk and start % chunk:
        tell_once("chunk", "a mask of transformers whose first key is inside of a chunk is made [seq_q, seq_kv]")
        return sdpa_mask(**arguments)
    if chunk and chunk < end:
        options["attention_chunk"] = chunk
    if not options and left < 0:
        plain_causal = q_length == kv_length or (aligned and q_length == 1) or (diagonal == 0 and q_length > 1)
        if right == 0 and causal_skip and plain_causal:
            return None
        if right < 0 and arguments.get("allow_is_bidirectional_skip", False):
            return None
    if not aligned:
        options["seqused_kv"] = torch.full((arguments["batch_size"],), end, dtype=torch.int32, device=device)
    options["window"] = (left, right)
    whole = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    shape = (arguments["batch_size"], 1, q_length, kv_length)
    return LazyMask(shape, device, options, lambda: sdpa_mask(**whole))


def _bounds(function):
    """(left, right, chunk) of attention() for a function of transformers; or the name of a function that has none."""
    name = getattr(function, "__qualname__", type(function).__name__)
    short = name.partition(".")[0]
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return short
    if name == "causal_mask_function":
        return -1, 0, 0
    if name == "bidirectional_mask_function":
        return -1, -1, 0
    inside = dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    )
    if name == "sliding_window_overlay.<locals>.inner_mask" and isinstance(inside.get("sliding_window"), int):
        return inside["sliding_window"] - 1, -1, 0
    if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask" and isinstance(inside.get("sliding_window"), int):
        return inside["sliding_window"], inside["sliding_window"], 0
    if name == "chunked_overlay.<locals>.inner_mask" and isinstance(inside.get("chunk_size"), int):
        padding = inside.get("left_padding")  # chunks are counted from the first token of each sequence
        return short if padding is None or padding.any() else (-1, -1, inside["chunk_size"])
    if name == "and_masks.<locals>.and_mask" and "mask_functions" in inside:
        parts = [_bounds(part) for part in inside["mask_functions"]]
        unknown = [part for part in parts if isinstance(part, str)]
        if unknown:
            return unknown[0]
        *sides, chunks = zip(*parts, strict=True)
        left, right = (min((b for b in side if b >= 0), default=-1) for side in sides)
        return short if sum(map(bool, chunks)) > 1 else (left, right, max(chunks))
    return short


def _padding(tokens, start, end, kv_length):
    """attention()'s options for bool [batch, tokens], whose keys begin at `start`; those up to `end` count."""
    if tokens is None:
        return {}
    keys = tokens[:, start : start + end].bool()
    keys = torch.nn.functional.pad(keys, (0, end - keys.shape[1]))
    if keys.all():
        return {}
    lengths = keys.sum(-1)
    if torch.equal(keys, torch.arange(end, device=keys.device) < lengths[:, None]):
        return {"key_lengths": lengths.to(torch.int32)}
    return {"mask": torch.nn.functional.pad(keys, (0, kv_length - end))[:, None, None, :]}


def tell_once(key, text):
    if key not in _told:
        _told.add(key)
        warnings.warn(f"flash_attention: {text}", stacklevel=3)
