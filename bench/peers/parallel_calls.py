"""What bench/multi_gpu.py times: attention over a sequence that is cut across ranks, ours and what one would use instead.

Every entry makes a call from local tensors q, k, v, dout [batch, rows, heads, head_dim] of this rank, zigzag.
"""

from functools import partial

import package  # noqa: F401 (makes flash_attention importable)
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from flash_attention import attention
from flash_attention.parallel import context_attention, cut, layout, ring
from flash_attention.parallel.call import Call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def data_parallel(case, world, rank):
    """Every rank attends its own batch: what scaling could be."""
    return lambda q, k, v: attention(q, k, v, causal=case.causal, window=window_of(case))


def ours(method):
    def make(case, world, rank):
        options = {"causal": case.causal, "window": window_of(case), "method": method}
        return lambda q, k, v: context_attention(q, k, v, None, **options)

    return make


def gather_sdpa(case, world, rank):
    """All of K and V, then torch's attention for each segment of rows: the plain way."""
    from torch.nn.attention.bias import causal_lower_right

    parts = layout.segments(case.seq, world, rank, "zigzag")

    def gathered(tensor):
        pieces = dist.nn.functional.all_gather(tensor.contiguous()) if world > 1 else [tensor]
        return layout.join(list(pieces)).transpose(1, 2)

    def run(q, k, v):
        k, v = gathered(k), gathered(v)
        outs = []
        for part in parts:
            rows = q[:, part.local : part.local + part.length].transpose(1, 2)
            keys = part.begin + part.length if case.causal else case.seq
            mask = causal_lower_right(part.length, keys) if case.causal and part.begin else None
            outs.append(
                scaled_dot_product_attention(
                    rows,
                    k[:, :, :keys],
                    v[:, :, :keys],
                    attn_mask=mask,
                    is_causal=case.causal and not part.begin,
                    enable_gqa=case.kv != case.heads,
                )
            )
        return torch.cat(outs, dim=2).transpose(1, 2)

    return run


def torch_ring(case, world, rank):
    """torch.distributed.tensor.experimental.context_parallel over torch's flash kernel; needs GPUs and equal heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    if world == 1:
        raise ValueError("a group of one has nothing to rotate")
    mesh = init_device_mesh("cuda", (world,))
    buffer = torch.zeros(1, case.seq, device="cuda")

    def run(q, k, v):
        group = case.heads // case.kv
        k, v = (t.repeat_interleave(group, dim=2) if group > 1 else t for t in (k, v))
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2)

    return run


ENTRIES = {
    "data_parallel": data_parallel,
    "ours_ring": ours("ring"),
    "ours_all_gather": ours("all_gather"),
    "ours_ulysses": ours("ulysses"),
    "gather_sdpa": gather_sdpa,
    "torch_ring": torch_ring,
}


def rejects(name, case, world, device):
    """Why an entry has no row here; empty where it has."""
    if name in ("gather_sdpa", "torch_ring") and case.window:
        return "no sliding window"
    if name == "torch_ring" and device != "cuda":
        return "runs on cuda only"
    if name == "torch_ring" and world == 1:
        return "needs more than one rank"
    if name == "torch_ring" and case.dtype == "float32":
        return "float32 is not supported"
    return ""


def window_of(case):
    return (-1, -1) if not case.window else (case.window, 0 if case.causal else case.window)


class Done:
    """An exchange, or a comparison of shapes, that has ended."""

    def wait(self):
        pass


class OnePlace:
    """The peers of a simulated rank: nothing is sent, and what would be received exists already."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def post(self, what, sends, receives):
        return Done()


class Simulated(ring.Turns):
    """All ranks' keys in one memory."""

    def __init__(self, parts, call, k, v):
        super().__init__(call, k, v)
        self.parts = parts

    def begin(self, turn):
        pass

    def take(self, turn):
        step = self.incoming(turn)
        return step, *(ring.picked(tensor, step.needs) for tensor in self.parts[step.source])


def simulated_steps(case, world, tensors):
    """(forward, backward): calls of one GPU that does the work of all `world` ranks in sequence, block after block."""
    q, k, v, dout = ([layout.split(t, world, rank) for rank in range(world)] for t in tensors)
    shape = cut.Shape(case.seq, world, "zigzag", case.window or -1, 0 if case.causal else case.window or -1)
    calls = [Call(OnePlace(rank, world), shape, Done()) for rank in range(world)]
    keys = list(zip(k, v, strict=True))
    ring.SLICE_ROWS = dict.fromkeys(("cpu", "cuda"), 1 << 62)  # all heads at once, as `Simulated` has them

    def forward():
        return [
            ring.forward(call, q[r], *keys[r], None, None, turns=partial(Simulated, keys)) for r, call in enumerate(calls)
        ]

    with torch.no_grad():
        results = forward()

    def backward():
        return [
            ring.backward(
                call, q[r], *keys[r], None, None, *results[r], dout[r], None, (False, False), turns=partial(Simulated, keys)
            )
            for r, call in enumerate(calls)
        ]

    return torch.no_grad()(forward), torch.no_grad()(backward)
