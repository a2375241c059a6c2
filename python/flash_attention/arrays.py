"""NumPy and CuPy arrays: forward only, results in the library of q."""

import secrets
from importlib import import_module

from flash_attention import _core
from flash_attention.arguments.shapes import check_tensors, key_mass_shape, lse_shape, max_logit_shape, score_width
from flash_attention.options import has_statistics


def run(tensors, options, seed, offset, return_lse):
    q, v = tensors.q, tensors.v
    library = import_module(type(q).__module__.partition(".")[0])
    check_tensors(tensors)
    for name, array in zip(tensors._fields, tensors, strict=True):
        if type(array).__name__ == "MaskedArray":  # the library would see what is behind its mask
            raise TypeError(
                f"{name}: got a masked array; mask= and key_lengths= hide keys, and numpy.ma.filled() makes an array"
            )
        if array is not None and type(array).__module__.partition(".")[0] in {"torch", "jax", "jaxlib"}:
            raise TypeError(f"{name}: expected an array of {library.__name__}, as q is, got {type(array).__name__}")
    for name, scores in (("bias", tensors.bias), ("mask", tensors.mask)):
        if scores is not None and not isinstance(scores, library.ndarray):
            raise TypeError(f"{name}: expected an array of {library.__name__}, as q is, got {type(scores).__name__}")
    width = score_width(tensors, options)
    tensors = tensors._replace(bias=_scores(library, tensors.bias, width), mask=_scores(library, tensors.mask, width))
    if seed is None:
        seed = secrets.randbits(63) if options.dropout_p else 0
    out = library.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)
    lse, statistics = None, None
    if return_lse or options.return_key_mass:
        lse = library.empty(lse_shape(tensors, options), dtype="float32")
    if has_statistics(options):
        shapes = max_logit_shape, key_mass_shape, lse_shape
        asked = options.return_max_logit, options.return_key_mass, options.return_entropy
        statistics = tuple(
            library.empty(shape(tensors, options), dtype="float32") if on else None
            for shape, on in zip(shapes, asked, strict=True)
        )
    stream = library.cuda.get_current_stream().ptr if library.__name__ == "cupy" else 0
    _core.forward(
        tensors, options, out, lse, seed, offset, stream, lambda size: library.empty(size, dtype="uint8"),
        statistics=statistics,
    )  # fmt: skip
    if statistics is not None:
        return (out, *((lse,) if return_lse else ()), *(values for values in statistics if values is not None))
    return (out, lse) if return_lse else out


def _scores(library, scores, width):
    """A bias or mask in the form that the library takes: the last axis has its full size and stride 1."""
    if scores is None or scores.ndim == 0:
        return scores
    if scores.shape[-1] == 1 != width:
        scores = library.broadcast_to(scores, (*scores.shape[:-1], width))
    return scores if scores.strides[-1] == scores.itemsize else library.ascontiguousarray(scores)
