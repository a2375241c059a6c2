"""Plugs this library into torch.nn.functional.scaled_dot_product_attention, by torch's own registry where it has one."""

import warnings

import torch

from flash_attention import torch_ops

NAME = "flash_attention"
_aten = torch.ops.aten
_fallback = None  # the handle, where torch has no registry to keep it


def register() -> None:
    """Makes torch's scaled_dot_product_attention use this library wherever torch would choose its flash kernels.

    Covers CPU and CUDA, forward and backward. What the kernels do not take (float64, head_dim above 256) stays with torch.
    """
    global _fallback
    attention = torch.nn.attention
    if hasattr(attention, "register_flash_attention_impl"):
        attention.register_flash_attention_impl(NAME, register_fn=_override)
        attention.activate_flash_attention_impl(NAME)
    elif _fallback is None:
        _fallback = _override()


def unregister() -> None:
    """Gives scaled_dot_product_attention back to torch."""
    global _fallback
    attention = torch.nn.attention
    if hasattr(attention, "current_flash_attention_impl"):
        if attention.current_flash_attention_impl() == NAME:
            attention.restore_flash_attention_impl()
    elif _fallback is not None:
        _fallback.remove()
        _fallback = None


class _Handle:
    """Keeps the overrides in place until remove()."""

    def __init__(self, libraries):
        self.libraries = libraries

    def remove(self):
        for library in self.libraries:
            library._destroy()
        self.libraries = []


def _override():
    cpu = torch.library.Library("aten", "IMPL", "CPU")
    _impl(cpu, "_scaled_dot_product_flash_attention_for_cpu", _cpu_forward, "CPU")
    _impl(cpu, "_scaled_dot_product_flash_attention_for_cpu_backward", _cpu_backward, "CPU")
    libraries = [cpu]
    if torch.cuda.is_available():
        cuda = torch.library.Library("aten", "IMPL", "CUDA")
        _impl(cuda, "_scaled_dot_product_flash_attention", _cuda_forward, "CUDA")
        _impl(cuda, "_scaled_dot_product_flash_attention_backward", _cuda_backward, "CUDA")
        libraries.append(cuda)
    return _Handle(libraries)


def _impl(library, name, function, key):
    """Overrides one op; `function` gets the kernel that was there as its first argument, for what it does not take."""
    kernel = torch.library.get_kernel(f"aten::{name}", key) if hasattr(torch.library, "get_kernel") else None

    def original(*arguments, **keywords):
        if kernel is None:
            raise NotImplementedError(f"{name}: these tensors need torch 2.9 or flash_attention.unregister()")
        return kernel.call_boxed(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *arguments, **keywords)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library.impl(name, lambda *arguments, **keywords: function(original, *arguments, **keywords))


def _taken(query, value):
    sizes = query.shape[-1], value.shape[-1]
    return query.dtype != torch.float64 and all(size % 8 == 0 and 0 < size <= 256 for size in sizes)


def _call(query, key, value, attn_mask, dropout_p, is_causal, scale):
    mask = bias = None
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[2])
        attn_mask = attn_mask if attn_mask.stride(-1) == 1 else attn_mask.contiguous()
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    tensors = (query, key, value, bias, mask, *(None,) * 9)
    deterministic = torch.are_deterministic_algorithms_enabled()
    scalars = (0, 0, scale, 0.0, is_causal, True, -1, -1, dropout_p, deterministic, True, False, "", 0, 0)
    return tensors, scalars


def _cpu_forward(original, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if not _taken(query, value):
        return original(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    out, lse, _ = torch_ops.forward(*_call(query, key, value, attn_mask, dropout_p, is_causal, scale), 0, 0, True)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(original, dout, query, key, value, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
    if not _taken(query, value):
        return original(dout, query, key, value, out, lse, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    tensors, scalars = _call(query, key, value, attn_mask, dropout_p, is_causal, scale)
    dq, dk, dv, _, _ = torch_ops.backward(tensors, scalars, out, lse, None, dout, None, False, False)
    return tuple(gradient.transpose(1, 2).contiguous().transpose(1, 2) for gradient in (dq, dk, dv))


def _cuda_forward(original, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if not _taken(query, value) or return_debug_mask:
        return original(query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)
    tensors, scalars = _call(query, key, value, None, dropout_p, is_causal, scale)
    out, lse, rng_state = torch_ops.forward(tensors, scalars, None, 0, True)
    state = torch.zeros(2, dtype=torch.int64) if rng_state is None else rng_state
    unused = torch.empty(0, dtype=torch.int64)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, query.new_empty(0)


def _cuda_backward(
    original,
    dout,
    query,
    key,
    value,
    out,
    lse,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    if not _taken(query, value):
        return original(
            dout, query, key, value, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
            philox_offset, scale=scale,
        )  # fmt: skip
    tensors, scalars = _call(query, key, value, None, dropout_p, is_causal, scale)
    dq, dk, dv, _, _ = torch_ops.backward(tensors, scalars, out, lse, philox_seed, dout, None, False, False)
    return dq, dk, dv
