"""NumPy and CuPy arrays: forward only, results in the library of q."""

import secrets
from importlib import import_module

from flash_attention import _core
from flash_attention.arguments.shapes import check_tensors, lse_shape, score_width


def run(tensors, scalars, seed, offset, return_lse):
    q, k, v, bias, mask, slopes, sink, *lengths = tensors
    library = import_module(type(q).__module__.partition(".")[0])
    check_tensors(tensors)
    for name, scores in (("bias", bias), ("mask", mask)):
        if scores is not None and not isinstance(scores, library.ndarray):
            raise TypeError(f"{name}: expected an array of {library.__name__}, as q is, got {type(scores).__name__}")
    width = score_width(tensors, scalars)
    tensors = (q, k, v, _scores(library, bias, width), _scores(library, mask, width), slopes, sink, *lengths)
    if seed is None:
        seed = secrets.randbits(63) if scalars[8] else 0
    out = library.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)
    lse = library.empty(lse_shape(tensors, scalars), dtype="float32") if return_lse else None
    stream = library.cuda.get_current_stream().ptr if library.__name__ == "cupy" else 0
    _core.forward(tensors, scalars, out, lse, seed, offset, stream, lambda size: library.empty(size, dtype="uint8"))
    return (out, lse) if return_lse else out


def _scores(library, scores, width):
    """A bias or mask as the library takes it: the last axis whole and of stride 1."""
    if scores is None or scores.ndim == 0:
        return scores
    if scores.shape[-1] == 1 != width:
        scores = library.broadcast_to(scores, (*scores.shape[:-1], width))
    return scores if scores.strides[-1] == scores.itemsize else library.ascontiguousarray(scores)
