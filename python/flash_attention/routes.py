"""How a call is computed: the only place that chooses.

route() gives the function that runs a call. It takes q, k, v, by keyword whatever attention(), attention_packed() and
attention_over_cache() take, and as `caller` a Caller. CPython makes a tuple and a dict for a call of more than 30
arguments, each keyword counted twice, which costs microseconds. Those functions therefore give their first arguments by
position, in the order of ARGUMENTS or CACHE_ARGUMENTS, and last a tuple of those that follow.

- eager: _core.attention (binding/attention.cpp). If the call is in the kernels' form it goes from there to the launch. What
  is not, comes back to general(), which brings it into that form or chooses another route.
- traced: torch's operations (pytorch/ops.py), which torch.compile, modes, transforms and profilers see.
- arrays: NumPy, CuPy, and other libraries through one of them.
- JAX.
"""

from collections import namedtuple

from flash_attention import _core
from flash_attention.arguments.names import Renamed, renamed
from flash_attention.arguments.options import make_options, plain_masks, with_tile
from flash_attention.arguments.seeds import check_seed
from flash_attention.options import Tensors, has_statistics
from flash_attention.tracing import is_tracing

ARGUMENTS, CACHE_ARGUMENTS = _core.arguments, _core.cache_arguments
eager_type = None  # the type of eager tensors, set at the first use of torch


def route():
    """The function that runs a call."""
    return general if is_tracing() else _core.attention


# What an entrance tells about itself, in a constant.
# over_cache: k and v are a cache; forward only.
# names: {argument: what the caller calls it}, for errors; None: ours.
# any_form: head dimensions and strides are brought into the kernels' form: zeros are added, rows are copied.
# function: its own name.
Caller = namedtuple("Caller", "over_cache names any_form function", defaults=(False, None, False, "attention"))
OURS = Caller()
OVER_CACHE = Caller(over_cache=True, function="attention_over_cache")


def general(q, k, v, *values, caller=OURS, **given):
    """A call of any form, of any library. `values`: first arguments in the order of ARGUMENTS, the last a tuple of more."""
    run = _cache if caller.over_cache else _attention
    if values:
        values = (*values[:-1], *values[-1])
        order = CACHE_ARGUMENTS if caller.over_cache else ARGUMENTS
        given.update(zip(order[: len(values)], values, strict=True))  # dynamo of torch 2.9 is strict in any case
    if caller.over_cache:
        given["caller"] = caller.function
    if caller.any_form:
        given["run"], run = run, _padded
    if caller.names is None:
        return run(q, k, v, **given)
    with Renamed(caller.names):
        return run(q, k, v, **given)


_core.set_python(general=general, renamed=renamed)


def _attention(
    q, k, v, *, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=0, max_seqlen_kv=0, bias=None, mask=None,
    alibi_slopes=None, sink=None, hidden_rows=None, block_mask=None, key_lengths=None, seqused_q=None, seqused_kv=None,
    causal=False, window=(-1, -1), softcap=0.0, dropout_p=0.0, seed=None, offset=0, scale=None, layout="bshd",
    alignment="bottom_right", deterministic=False, return_lse=False, kernel=None, score_mod=None, mask_mod=None,
    tile=None, q_descale=None, k_descale=None, v_descale=None, out_dtype=None, key_indices=None,
    key_blocks=None, key_counts=None, key_block_size=None, **named,
):  # fmt: skip
    if tile is not None:
        kernel = with_tile(kernel, tile)
    if callable(getattr(block_mask, "mask_mod", None)) and cu_seqlens_q is None:
        block_mask, mask_mod = _blocks_as_program()(block_mask, mask_mod, q, k, layout)
    block_sizes, kept = (0, 0), None
    if hidden_rows is not None or block_mask is not None or (mask is not None and type(mask) is not eager_type):
        mask, hidden_rows, block_mask, kept = _bare_masks(mask, hidden_rows, block_mask)
    if hidden_rows is not None or block_mask is not None:
        dense = cu_seqlens_q is None and len(q.shape) == 4
        seq_q = q.shape[-2 if layout == "bhsd" else -3] if dense else None
        hidden_rows, causal, window, block_mask, block_sizes = plain_masks(hidden_rows, causal, window, block_mask, seq_q)
    if _learns(scale) or _learns(softcap) or _learns(alibi_slopes):
        lengths = cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv
        q, scale, softcap, alibi_slopes, bias, score_mod = _without_learned()(
            q, k, scale, softcap, alibi_slopes, bias, score_mod, lengths, layout
        )
    tensors = Tensors(
        q, k, v, bias, mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, key_lengths,
        hidden_rows, block_mask, key_indices, key_blocks, key_counts,
    )  # fmt: skip
    if key_indices is not None or key_blocks is not None:
        _check_lists("key_indices" if key_blocks is None else "key_blocks", bias, score_mod, mask_mod)
    options = make_options(
        scale=scale, softcap=softcap, causal=causal, alignment=alignment, window=window, dropout_p=dropout_p,
        deterministic=deterministic, layout=layout, kernel=kernel,
        max_seqlen_q=max_seqlen_q or 0, max_seqlen_kv=max_seqlen_kv or 0, block_sizes=block_sizes,
        key_block_size=key_block_size, **named,
    )  # fmt: skip
    arguments = tensors, options, *check_seed(seed, offset), return_lse
    return _run(arguments, (score_mod, mask_mod), (q_descale, k_descale, v_descale, out_dtype), kept)


def _check_lists(name, bias, score_mod, mask_mod):
    """Refuses what lists of keys are not combined with yet."""
    if score_mod is not None or mask_mod is not None:
        raise NotImplementedError(f"{name}: it is not combined with score_mod, mask_mod and learned scores yet")
    if _learns(bias):
        raise NotImplementedError(f"bias: requires a gradient, which is not computed with {name}; detach() it")


def _learns(number):
    """Whether it is a tensor that requires a gradient where gradients are recorded."""
    if number is None or isinstance(number, (float, int)) or not getattr(number, "requires_grad", False):
        return False
    return _is_grad_enabled()


def _cache(q, k, v, **given):
    return _run_over_cache()(q, k, v, **given)


def _padded(q, k, v, **given):
    from flash_attention.arguments.head_dim import in_kernel_form

    return in_kernel_form(q, k, v, **given)


def _bare_masks(mask, hidden_rows, block_mask):
    from flash_attention.masks.prepared import bare_masks

    return bare_masks(mask, hidden_rows, block_mask)


def _run(arguments, functions, of_narrow, kept):
    """By the function that runs such a call. `of_narrow`: descales and out_dtype, of 8-bit tensors. `kept`: where prepared
    masks are."""
    q, options = arguments[0].q, arguments[1]
    has_program = functions[0] is not None or functions[1] is not None
    narrow = _is_narrow(q, *of_narrow)
    if has_statistics(options):
        _check_statistics(options, has_program, narrow)
        return run_of(q)(*arguments)
    if has_program and narrow:
        raise NotImplementedError("score_mod, mask_mod: 8-bit tensors take neither")
    if functions[1] is not None or is_tracing():  # not all masks are prepared, or others do it: torch.compile's graph
        kept = None
    if has_program:
        return _run_program()(*arguments, *functions, kept)
    if kept is not None and not narrow:
        return _run_prepared()(*arguments, kept)
    return _run_narrow()(*arguments, *of_narrow) if narrow else run_of(q)(*arguments)


def _check_statistics(options, has_program, narrow):
    name = None
    for one in ("return_entropy", "return_key_mass", "return_max_logit"):
        on = getattr(options, one)
        if not isinstance(on, bool):
            raise TypeError(f"{one}: expected a bool, got {type(on).__name__}")
        name = one if on else name
    if has_program:
        raise NotImplementedError(f"{name}: not computed with score_mod, mask_mod, or a softcap or slopes that learn")
    if narrow:
        raise NotImplementedError(f"{name}: not computed for tensors of 8 bits")
    if options.standard:
        raise NotImplementedError(f'{name}: the textbook algorithm, kernel="standard", does not compute it')


def _is_narrow(q, q_descale, k_descale, v_descale, out_dtype):
    """Whether q is of 8 bits, or something of the call says so."""
    if not (q_descale is k_descale is v_descale is out_dtype is None):
        return True
    size = getattr(getattr(q, "dtype", None), "itemsize", 0)  # torch.fx's stand-ins have no number
    return isinstance(size, int) and size == 1


# Import statements, which torch.compile can follow: a compiled function may be the first to come here.
def _run_of_torch():
    from flash_attention.pytorch.autograd import run

    return run


def _run_of_arrays():
    from flash_attention.arrays import run

    return run


def _run_of_jax():
    from flash_attention.jax import run

    return run


def _run_over_cache():
    from flash_attention.torch_cache import run

    return run


def _run_narrow():
    from flash_attention.pytorch import narrow as torch_narrow

    return torch_narrow.run


def _run_program():
    from flash_attention.flex.attention import run_program

    return run_program


def _run_prepared():
    from flash_attention.flex.attention import run_prepared

    return run_prepared


def _without_learned():
    from flash_attention.flex.learned import without_learned

    return without_learned


def _is_grad_enabled():
    import torch

    return torch.is_grad_enabled()


def _blocks_as_program():
    from flash_attention.flex.block_mask import as_program

    return as_program


# Which function runs the tensors of which library: run(tensors, options, seed, offset, return_lse).
_LIBRARIES = {
    "torch": _run_of_torch,
    "numpy": _run_of_arrays,
    "cupy": _run_of_arrays,
    "jax": _run_of_jax,
    "jaxlib": _run_of_jax,
}
_runs = {}


def run_of(q):
    """The function that runs calls of q's library."""
    if is_tracing():
        return _find_run(type(q))
    run = _runs.get(type(q))
    if run is None:
        run = _runs[type(q)] = _find_run(type(q))
    return run


def _find_run(kind):
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        if library in _LIBRARIES:
            return _LIBRARIES[library]()
    from flash_attention import any_array

    if any_array.is_array(kind):
        return any_array.run
    raise TypeError(
        f"q: expected a tensor of torch, NumPy, CuPy or JAX, or one with __dlpack__ or __cuda_array_interface__, "
        f"got {kind.__name__}"
    )
