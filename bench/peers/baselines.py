"""The baselines. Every entry has the same signature, run(q, k, v, case) -> out on tensors of [batch, seq, heads, head_dim],
and a reason why it cannot run a case here, empty if it can."""

import functools
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import package
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers import flex_attention, megatron_attention, megatron_package, operands
from peers.operands import DTYPES


@dataclass(frozen=True)
class Baseline:
    name: str
    what: str
    run: Callable
    reject: Callable  # (case, device) -> reason
    passes: tuple[str, ...] = ("forward", "backward")
    packs: bool = False  # takes case.lengths as it is; others are given a padded batch
    stores_scores: bool = False  # memory for all of them; it is timed with no other in memory
    element: str = ""  # of q, k and v, where it is not the case's own

    @property
    def form(self):
        """Entries of the same form are given the same tensors."""
        return self.packs, self.element

    def lacks(self, which):
        """Why it has nothing to measure for this pass; empty where it has."""
        needed = ("forward", "backward") if which == "both" else (which,)
        missing = [name for name in needed if name not in self.passes]
        return f"no {missing[0]} pass" if missing else ""


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


# What a case may ask for, and what an entry that does not take it says.
OPTIONS = {
    "window": (lambda case: case.window, "no sliding window"),
    "mask": (lambda case: case.masked, "no boolean mask"),
    "dropout": (lambda case: case.dropout_p, "no dropout"),
    "softcap": (lambda case: case.softcap, "no softcap"),
    "alibi": (lambda case: case.alibi, "no ALiBi"),
    "bias": (lambda case: case.bias, "no bias"),
    "learned": (lambda case: case.bias == "learned", "no gradient of a bias"),
}


def refuse(*takes, dtypes=tuple(DTYPES), devices=("cpu", "cuda"), needs=""):
    """A reject function: which options the entry takes, its types and devices, and a module it needs."""

    def reject(case, device):
        if needs and not installed(needs):
            return f"{needs} is not installed"
        if device not in devices:
            return f"runs on {' or '.join(devices)} only"
        if case.dtype not in dtypes:
            return f"{case.dtype} is not supported"
        return next((why for name, (asked, why) in OPTIONS.items() if asked(case) and name not in takes), "")

    return reject


HALF = ("float16", "bfloat16")


def sdpa(backend=None):
    """PyTorch's, one backend or its own choice; what has no argument there goes into the mask or the bias."""

    def run(q, k, v, case):
        mask = operands.attn_mask(case, q.device.type)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, case.dropout_p, is_causal=case.causal and mask is None, enable_gqa=case.kv != case.heads
            ).transpose(1, 2)

    return run


def ours(kernel=None, **more):
    def run(q, k, v, case):
        from flash_attention import attention, attention_packed

        options = {"causal": case.causal, "window": operands.window_of(case), "kernel": kernel, **more}
        if case.dropout_p:
            options |= {"dropout_p": case.dropout_p, "seed": 0}
        if case.masked:
            options["mask"] = operands.boolean_mask(case, q.device.type)
        if case.softcap:
            options["softcap"] = case.softcap
        if case.alibi:
            options["alibi_slopes"] = operands.slopes(case, q.device.type)
        if case.bias:
            options["bias"] = operands.bias(case, q.device.type)
        if q.dim() == 3:
            return attention_packed(q, k, v, operands.bounds(case, q.device), max_seqlen_q=case.seq, **options)
        return attention(q, k, v, **options)

    return run


def reject_ours(case, device):
    return package.unavailable


def reject_precision(case, device):
    """Of a precision of float32 other than the default."""
    return package.unavailable or ("" if case.dtype == "float32" and device == "cuda" else "float32 on a GPU only")


def of_fp8(reject):
    """The same in 8 bits, for plain cases: out is bfloat16."""

    def also(case, device):
        plain = case.plain and case.dtype == "bfloat16"
        return reject(case, device) or ("" if plain else "full or causal, out in bfloat16 only")

    return also


def triton(q, k, v, case):
    from flash_attention.triton import attention

    return attention(q, k, v, causal=case.causal)


def flash_attn_2(q, k, v, case):
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    if case.lengths:
        ends = operands.bounds(case, q.device)
        return flash_attn_varlen_func(q, k, v, ends, ends, case.seq, case.seq, case.dropout_p, causal=case.causal)
    options = {"causal": case.causal, "window_size": operands.window_of(case), "softcap": case.softcap}
    if case.alibi:
        options["alibi_slopes"] = operands.slopes(case, q.device.type)
    return flash_attn_func(q, k, v, case.dropout_p, **options)


def flash_attn_3(q, k, v, case):
    from flash_attn_interface import flash_attn_func

    return first(flash_attn_func(q, k, v, causal=case.causal, window_size=operands.window_of(case), softcap=case.softcap))


def flash_attn_4(q, k, v, case):
    from flash_attn.cute import flash_attn_func

    window = tuple(bound if bound >= 0 else None for bound in operands.window_of(case))
    return first(flash_attn_func(q, k, v, causal=case.causal, window_size=window, softcap=case.softcap))


def first(results):
    return results[0] if isinstance(results, tuple) else results


def flashinfer(q, k, v, case):
    rows = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (q, k, v))
    return flashinfer_plan(case, q.dtype, q.device).run(*rows).view(*q.shape[:-1], v.shape[-1])


@functools.lru_cache(maxsize=1)
def flashinfer_plan(case, dtype, device):
    """What FlashInfer makes before the calls of a model's layers: not timed."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    plan = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(384 << 20, dtype=torch.uint8, device=device), "NHD")
    keys = torch.tensor((0, *(case.lengths or [case.seq] * case.batch))).cumsum(0).to(torch.int32).to(device)
    queries = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.queries if case.queries else keys
    plan.plan(
        queries, keys, case.heads, case.kv, case.head_dim, head_dim_vo=case.dim_v, causal=case.causal,
        logits_soft_cap=case.softcap, q_data_type=dtype,
    )  # fmt: skip
    return plan


GPU = ("cuda",)
MASKED = ("dropout", "window", "mask", "alibi", "bias")  # of SDPA, as its mask or bias
FIXED = [
    Baseline("sdpa_math", "PyTorch SDPA, the scores stored", sdpa(SDPBackend.MATH), refuse(*MASKED, "learned"),
             stores_scores=True),
    Baseline("sdpa_efficient", "PyTorch SDPA, memory-efficient", sdpa(SDPBackend.EFFICIENT_ATTENTION),
             refuse(*MASKED, "learned", devices=GPU)),
    Baseline("sdpa_flash", "PyTorch SDPA, FlashAttention-2", sdpa(SDPBackend.FLASH_ATTENTION), refuse("dropout")),
    Baseline("sdpa_cudnn", "PyTorch SDPA, cuDNN", sdpa(SDPBackend.CUDNN_ATTENTION),
             refuse(*MASKED, devices=GPU, dtypes=HALF)),
    Baseline("sdpa", "PyTorch SDPA, its own choice; a window as a mask", sdpa(), refuse(*MASKED, "learned")),
    Baseline("flex", "FlexAttention, compiled", flex_attention.attention,
             refuse("window", "mask", "softcap", "alibi", "bias", "learned", devices=GPU)),
    Baseline("megatron_local", "Megatron-LM core attention, separate operations", megatron_attention.local,
             refuse("dropout"), stores_scores=True),
    Baseline("megatron_fused", "Megatron-LM core attention, fused scale-mask-softmax", megatron_attention.fused,
             refuse("dropout", devices=GPU, dtypes=HALF, needs="triton"), stores_scores=True),
    Baseline("megatron_core", "Megatron-LM's own DotProductAttention", megatron_package.attention,
             refuse("dropout", devices=GPU, needs="megatron.core"), stores_scores=True),
    Baseline("triton", "our Triton kernels", triton, refuse(devices=GPU, dtypes=HALF, needs="triton")),
    Baseline("flash_attn", "flash_attn 2", flash_attn_2,
             refuse("dropout", "window", "softcap", "alibi", devices=GPU, dtypes=HALF, needs="flash_attn"), packs=True),
    Baseline("flash_attn_3", "flash_attn_interface", flash_attn_3,
             refuse("window", "softcap", devices=GPU, dtypes=HALF, needs="flash_attn_interface")),
    Baseline("flash_attn_3_fp8", "flash_attn_interface, q, k and v in 8 bits", flash_attn_3,
             of_fp8(refuse(devices=GPU, dtypes=HALF, needs="flash_attn_interface")), passes=("forward",),
             element="float8_e4m3fn"),
    Baseline("flash_attn_4", "flash_attn.cute", flash_attn_4,
             refuse("window", "softcap", devices=GPU, dtypes=HALF, needs="flash_attn.cute")),
    Baseline("flashinfer", "FlashInfer, ragged prefill, planned before", flashinfer,
             refuse("softcap", devices=GPU, dtypes=HALF, needs="flashinfer"), passes=("forward",), packs=True),
    Baseline("standard", "our standard attention, the scores stored", ours("standard"), reject_ours,
             stores_scores=True),
    Baseline("ours", "flash_attention", ours(), reject_ours, packs=True),
    Baseline("ours_ieee", "flash_attention, products in float32", ours(precision="ieee"), reject_precision),
    Baseline("ours_tf32", "flash_attention, one product of tf32", ours(precision="tf32"), reject_precision),
    Baseline("ours_fp8", "flash_attention, q, k and v in 8 bits", ours(), of_fp8(reject_ours), passes=("forward",),
             element="float8_e4m3fn"),
]  # fmt: skip


def kernels():
    """One entry for every rung of the teaching ladder."""
    if package.unavailable:
        return []
    import flash_attention

    return [
        Baseline(kernel["name"], "a rung of the ladder", ours(kernel["name"]), refuse(devices=(kernel["device"],)),
                 passes=(kernel["pass"],))
        for kernel in flash_attention.kernels() if kernel["name"].startswith("ladder/")
    ]  # fmt: skip


def all_baselines():
    return {baseline.name: baseline for baseline in (*FIXED, *kernels())}


def select(names):
    """The entries named, in order; all but the ladder where none is named; `ladder` names every rung."""
    known = all_baselines()
    if not names:
        return list(FIXED)
    chosen = []
    for name in names:
        if name == "ladder":
            chosen += kernels()
        elif name in known:
            chosen.append(known[name])
        else:
            raise ValueError(f"baseline: got '{name}'; allowed: {', '.join(known)}, ladder")
    return chosen


def inputs(case, baseline, device, needs_grad, seed=0):
    """(q, k, v, gradient of out or None), random normal; packed as [tokens, heads, head_dim] where the entry takes that."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = (case.tokens,) if case.lengths and baseline.packs else (case.batch, case.seq)
    q_rows = (case.batch, case.queries) if case.queries else rows

    def make(rows, heads, dim):
        return torch.randn(*rows, heads, dim, generator=generator, device=device, dtype=DTYPES[case.dtype])

    q, k = make(q_rows, case.heads, case.head_dim), make(rows, case.kv, case.head_dim)
    tensors = q, k, make(rows, case.kv, case.dim_v)
    if baseline.element:
        tensors = (t.to(getattr(torch, baseline.element)) for t in tensors)
    grad = make(q_rows, case.heads, case.dim_v) if needs_grad else None
    return *(t.requires_grad_(needs_grad) for t in tensors), grad


def wanted(case, q, k, v):
    """What the backward pass gives the gradients of."""
    return (q, k, v, operands.bias(case, q.device.type)) if case.bias == "learned" else (q, k, v)
