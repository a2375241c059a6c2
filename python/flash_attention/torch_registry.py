"""Plugs this library into torch's own attention, through torch's registry of flash implementations if it has one."""

import warnings

import torch

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.options import Options, Tensors
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch import varlen as torch_varlen

NAME = "flash_attention"
_aten = torch.ops.aten
_fallback = None  # the handle, if torch has no registry to keep it


def register() -> None:
    """Makes torch's own attention use this library whenever torch could use its flash kernels.

        register()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)  # by this library if it can
        unregister()

    This applies to scaled_dot_product_attention, nested tensors in it, and torch.nn.attention.varlen.varlen_attn; CPU and
    CUDA, forward and backward. If torch prefers cuDNN to its flash kernels, flash has precedence until unregister().
    Calls that the kernels do not support (float64, head_dim above 576) stay with torch; why_torch says why.
    """
    global _fallback
    attention = torch.nn.attention
    if offer():
        attention.activate_flash_attention_impl(NAME)
    elif _fallback is None:
        _fallback = _override()


def offer() -> bool:
    """Lists this library among torch's flash implementations, and activates nothing; False if torch has no such list.

    torch.nn.attention.activate_flash_attention_impl("flash_attention") then does what register() does.
    """
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        return False
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_override)
    return True


def is_registered() -> bool:
    """Whether torch's attention uses this library now."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return _fallback is not None if current is None else current() == NAME


def why_torch(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, **wrong
) -> str | None:
    """Why torch's scaled_dot_product_attention would not use this library for these arguments; None if it would.

    For example:

        print(why_torch(q, k, v, is_causal=True))
    """
    if wrong:
        refuse_keywords(why_torch, wrong)
    if not is_registered():
        return "flash_attention.register() has not been called, or another implementation was activated since"
    if query.is_nested:
        return None if query.is_cuda else "query: nested tensors on a CPU go to torch's math; on CUDA they are taken"
    choice = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    backend = torch.nn.attention.SDPBackend(choice)
    if backend != torch.nn.attention.SDPBackend.FLASH_ATTENTION:
        what = " with an attn_mask" if attn_mask is not None else ""
        return f"torch chooses {backend.name} for these arguments{what}; only its flash kernels are replaced"
    return torch_varlen.why_not(query, value)


def unregister() -> None:
    """Gives scaled_dot_product_attention back to torch.

    For example:

        register()
        unregister()
    """
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

    def __init__(self, libraries, preference=None):
        self.libraries = libraries
        self.preference = preference

    def remove(self):
        for library in self.libraries:
            library._destroy()
        self.libraries = []
        if self.preference is not None:
            self.preference.remove()


def flash_first(order: list[int]) -> list[int]:
    """torch's order of attention backends; if cuDNN was before flash, flash takes its place."""
    backends = torch.nn.attention.SDPBackend
    flash, cudnn = int(backends.FLASH_ATTENTION), int(backends.CUDNN_ATTENTION)
    if flash not in order or cudnn not in order[: order.index(flash)]:
        return list(order)
    moved = [backend for backend in order if backend != flash]
    moved.insert(moved.index(cudnn), flash)
    return moved


class _FlashFirst:
    """Puts flash before cuDNN, which torch 2.10 and later prefer on Hopper and Blackwell, until remove().

    torch sets its order at its first choice on a GPU, and overwrites any order set before. So this makes a choice first. It
    waits until the program has initialized CUDA, because a process cannot fork after that.
    """

    def __init__(self):
        self.orders = None
        self.removed = False
        torch.cuda._lazy_call(self._apply)

    def _apply(self):
        if self.removed:
            return
        probe = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(probe, probe, probe)
        order = torch._C._get_sdp_priority_order()
        self.orders = order, flash_first(order)
        torch._C._set_sdp_priority_order(self.orders[1])

    def remove(self):
        self.removed = True
        if self.orders is not None and torch._C._get_sdp_priority_order() == self.orders[1]:
            torch._C._set_sdp_priority_order(self.orders[0])


def _override():
    cpu = torch.library.Library("aten", "IMPL", "CPU")
    _impl(cpu, "_scaled_dot_product_flash_attention_for_cpu", _cpu_forward, "CPU")
    _impl(cpu, "_scaled_dot_product_flash_attention_for_cpu_backward", _cpu_backward, "CPU")
    for name, function in torch_varlen.OPS.items():
        _impl(cpu, name, function, "CPU")
    libraries = [cpu]
    preference = None
    if torch.cuda.is_available():
        cuda = torch.library.Library("aten", "IMPL", "CUDA")
        _impl(cuda, "_scaled_dot_product_flash_attention", _cuda_forward, "CUDA")
        _impl(cuda, "_scaled_dot_product_flash_attention_backward", _cuda_backward, "CUDA")
        for name, function in torch_varlen.OPS.items():
            _impl(cuda, name, function, "CUDA")
        libraries.append(cuda)
        if hasattr(torch._C, "_set_sdp_priority_order"):  # torch 2.6
            preference = _FlashFirst()
    return _Handle(libraries, preference)


def _impl(library, name, function, key):
    """Overrides one op. `function` gets the original kernel as its first argument, for calls that it does not support."""
    if not hasattr(_aten, name):  # an older torch
        return
    there = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
    kernel = torch.library.get_kernel(f"aten::{name}", key) if there and hasattr(torch.library, "get_kernel") else None

    def original(*arguments, **keywords):
        if kernel is None:
            raise NotImplementedError(
                f"{name}: torch has no kernel for {key}, and flash_attention does not take these tensors"
                if not there
                else f"{name}: these tensors need torch 2.9 or flash_attention.unregister()"
            )
        return kernel.call_boxed(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *arguments, **keywords)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library.impl(name, lambda *arguments, **keywords: function(original, *arguments, **keywords))


def _call(query, key, value, attn_mask, dropout_p, is_causal, scale):
    mask = bias = None
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[2])
        attn_mask = attn_mask if attn_mask.stride(-1) == 1 else attn_mask.contiguous()
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    tensors = Tensors(query, key, value, bias, mask)
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = Options(
        scale=scale, causal=is_causal, top_left=True, dropout_p=dropout_p, deterministic=deterministic, heads_first=True
    )
    return tensors, options


def _cpu_forward(original, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if torch_varlen.why_not(query, value):
        return original(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    out, lse, _ = torch_ops.forward(*_call(query, key, value, attn_mask, dropout_p, is_causal, scale), 0, 0, True)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(original, dout, query, key, value, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
    if torch_varlen.why_not(query, value):
        return original(dout, query, key, value, out, lse, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    tensors, options = _call(query, key, value, attn_mask, dropout_p, is_causal, scale)
    dq, dk, dv, _, _ = torch_ops.backward(tensors, options, out, lse, None, dout, None, False, False)
    return tuple(gradient.transpose(1, 2).contiguous().transpose(1, 2) for gradient in (dq, dk, dv))


def _cuda_forward(original, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if torch_varlen.why_not(query, value, return_debug_mask=return_debug_mask):
        return original(query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)
    tensors, options = _call(query, key, value, None, dropout_p, is_causal, scale)
    out, lse, rng_state = torch_ops.forward(tensors, options, None, 0, True)
    state = torch.zeros(2, dtype=torch.int64, device="cpu") if rng_state is None else rng_state
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
    if torch_varlen.why_not(query, value):
        return original(
            dout, query, key, value, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
            philox_offset, scale=scale,
        )  # fmt: skip
    tensors, options = _call(query, key, value, None, dropout_p, is_causal, scale)
    dq, dk, dv, _, _ = torch_ops.backward(tensors, options, out, lse, philox_seed, dout, None, False, False)
    return dq, dk, dv
