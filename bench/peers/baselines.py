"""What attention is compared with. Every entry has the same signature, run(q, k, v, case) -> out on tensors of
[batch, seq, heads, head_dim], and a reason why it cannot run a case here, empty where it can."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import package
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers import megatron_attention, megatron_package

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Baseline:
    name: str
    what: str
    run: Callable
    reject: Callable  # (case, device) -> reason
    passes: tuple[str, ...] = ("forward", "backward")
    packs: bool = False  # takes case.lengths as it is; others are given a padded batch
    stores_scores: bool = False  # memory for all of them; it is timed with no other in memory

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


def refuse(*, window=False, mask=False, dropout=True, dtypes=tuple(DTYPES), devices=("cpu", "cuda"), needs=""):
    """A reject function: what the entry supports (window, mask, dropout, dtypes, devices), and a module it needs."""

    def reject(case, device):
        if needs and not installed(needs):
            return f"{needs} is not installed"
        if device not in devices:
            return f"runs on {' or '.join(devices)} only"
        if case.dtype not in dtypes:
            return f"{case.dtype} is not supported"
        if case.window and not window:
            return "no sliding window"
        if case.masked and not mask:
            return "no boolean mask"
        return "no dropout" if case.dropout_p and not dropout else ""

    return reject


HALF = ("float16", "bfloat16")


def sdpa(backend):
    def run(q, k, v, case):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, dropout_p=case.dropout_p, is_causal=case.causal, enable_gqa=case.kv != case.heads
            )
        return out.transpose(1, 2)

    return run


@cache
def boolean_mask(case, device):
    """What SDPA is told about a window, and everyone about a masked case: [1, 1, queries, keys], true where seen."""
    queries = case.queries or case.seq
    if case.masked == "random":
        mask = torch.rand(queries, case.seq, generator=torch.Generator().manual_seed(1)) < 0.5
    elif case.masked:
        document = torch.bucketize(torch.arange(case.seq), torch.tensor((1, 3, 6)) * case.seq // 10, right=True)
        mask = document[case.seq - queries :, None] == document[None]
    else:
        i, j = torch.arange(queries)[:, None] + case.seq - queries, torch.arange(case.seq)[None]
        mask = (j >= i - case.window) & (j <= (i if case.causal else i + case.window))
    return mask[None, None].to(device)


def sdpa_with_mask(q, k, v, case):
    mask = boolean_mask(case, q.device.type) if case.window or case.masked else None
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, case.dropout_p, is_causal=case.causal and mask is None, enable_gqa=case.kv != case.heads
    ).transpose(1, 2)


@cache
def compiled_flex():
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    from torch.nn.attention.flex_attention import flex_attention

    functorch.donated_buffer = False  # the backward pass is timed many times from one forward pass
    dynamo.recompile_limit = 1000  # one compilation per shape; past the limit it would not be compiled at all
    return torch.compile(flex_attention, dynamic=False)


@cache
def block_mask(case, device):
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b, h, i, j):
        seen = (j <= i) if case.causal else (j <= i + case.window)
        return seen & (j >= i - case.window) if case.window else seen

    return create_block_mask(sees, None, None, case.seq, case.seq, device)


def flex(q, k, v, case):
    mask = block_mask(case, q.device) if case.causal or case.window else None
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return compiled_flex()(q, k, v, block_mask=mask, enable_gqa=case.kv != case.heads).transpose(1, 2)


@cache
def bounds(case, device):
    """cu_seqlens of a packed case."""
    return torch.tensor((0, *case.lengths)).cumsum(0).to(torch.int32).to(device)


def window_of(case):
    """(left, right), -1 for no limit."""
    return (case.window, 0 if case.causal else case.window) if case.window else (-1, -1)


def ours(kernel):
    def run(q, k, v, case):
        from flash_attention import attention, attention_packed

        options = {"causal": case.causal, "window": window_of(case), "dropout_p": case.dropout_p, "kernel": kernel}
        if case.dropout_p:
            options["seed"] = 0
        if case.masked:
            options["mask"] = boolean_mask(case, q.device.type)
        if q.dim() == 3:
            return attention_packed(q, k, v, bounds(case, q.device), max_seqlen_q=case.seq, **options)
        return attention(q, k, v, **options)

    return run


def reject_ours(case, device):
    return package.unavailable


def triton(q, k, v, case):
    from flash_attention.triton import attention

    return attention(q, k, v, causal=case.causal)


def flash_attn_2(q, k, v, case):
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    if case.lengths:
        ends = bounds(case, q.device)
        return flash_attn_varlen_func(q, k, v, ends, ends, case.seq, case.seq, case.dropout_p, causal=case.causal)
    return flash_attn_func(q, k, v, case.dropout_p, causal=case.causal, window_size=window_of(case))


def flash_attn_3(q, k, v, case):
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q, k, v, causal=case.causal, window_size=window_of(case))
    return out[0] if isinstance(out, tuple) else out


GPU = ("cuda",)
FIXED = [
    Baseline("sdpa_math", "PyTorch SDPA, the scores stored", sdpa(SDPBackend.MATH), refuse(), stores_scores=True),
    Baseline("sdpa_efficient", "PyTorch SDPA, memory-efficient", sdpa(SDPBackend.EFFICIENT_ATTENTION), refuse(devices=GPU)),
    Baseline("sdpa_flash", "PyTorch SDPA, FlashAttention-2", sdpa(SDPBackend.FLASH_ATTENTION), refuse()),
    Baseline("sdpa_cudnn", "PyTorch SDPA, cuDNN", sdpa(SDPBackend.CUDNN_ATTENTION), refuse(devices=GPU, dtypes=HALF)),
    Baseline("sdpa", "PyTorch SDPA, its own choice; a window as a mask", sdpa_with_mask, refuse(window=True, mask=True)),
    Baseline("flex", "FlexAttention, compiled", flex, refuse(devices=GPU, window=True, dropout=False)),
    Baseline("megatron_local", "Megatron-LM core attention, separate operations", megatron_attention.local, refuse(),
             stores_scores=True),
    Baseline("megatron_fused", "Megatron-LM core attention, fused scale-mask-softmax", megatron_attention.fused,
             refuse(devices=GPU, dtypes=HALF, needs="triton"), stores_scores=True),
    Baseline("megatron_core", "Megatron-LM's own DotProductAttention", megatron_package.attention,
             refuse(devices=GPU, needs="megatron.core"), stores_scores=True),
    Baseline("triton", "our Triton kernels", triton, refuse(devices=GPU, dtypes=HALF, dropout=False, needs="triton")),
    Baseline("flash_attn", "flash_attn 2", flash_attn_2, refuse(devices=GPU, dtypes=HALF, window=True, needs="flash_attn"),
             packs=True),
    Baseline("flash_attn_3", "flash_attn_interface", flash_attn_3,
             refuse(devices=GPU, dtypes=HALF, window=True, dropout=False, needs="flash_attn_interface")),
    Baseline("standard", "our standard attention, the scores stored", ours("standard"), reject_ours,
             stores_scores=True),
    Baseline("ours", "flash_attention", ours(None), reject_ours, packs=True),
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

    def make(rows, heads):
        return torch.randn(*rows, heads, case.head_dim, generator=generator, device=device, dtype=DTYPES[case.dtype])

    q, k, v = make(q_rows, case.heads), make(rows, case.kv), make(rows, case.kv)
    return *(t.requires_grad_(needs_grad) for t in (q, k, v)), make(q_rows, case.heads) if needs_grad else None
