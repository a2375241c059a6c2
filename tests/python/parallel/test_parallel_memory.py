"""Memory of a rank: its tensors, their gradients and two exchanged blocks, whatever the number of ranks."""

import pytest
import torch
from parallel_pool import Pool


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


def peaks(group, heads, heads_kv, dtype, causal):
    """Most bytes alive in both passes, inputs included, and bytes of q and k. Not counted: the workspace of a kernel, which
    a call in one process has, too."""
    import torch.distributed as dist
    from flash_attention.parallel import context_attention
    from flash_attention.pytorch import ops as torch_ops
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(dist.get_rank(group))
    sizes = [(1, 512, count, 64) for count in (heads, heads_kv, heads_kv, heads)]
    q, k, v, dout = (torch.randn(*size, dtype=dtype) for size in sizes)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    held = sum(tensor.nbytes for tensor in inputs)

    def most(call):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            call()
        alive = highest = 0
        for event in sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                alive += event.nbytes()
                highest = max(highest, alive)
        return highest

    workspace = torch.empty(1 << 20, dtype=torch.uint8)
    torch_ops.workspace = lambda like, size: workspace[:size]  # made before anything is counted

    def forward():
        return context_attention(*inputs, group, causal=causal, method="ring")

    forward()  # what is made once
    return held + dout.nbytes + most(lambda: forward().backward(dout)), q.nbytes, k.nbytes


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "heads,heads_kv,dtype", [(8, 2, torch.float32), (4, 4, torch.float32), (16, 4, torch.bfloat16), (8, 2, torch.bfloat16)]
)
def test_memory_of_a_rank(pool, heads, heads_kv, dtype, causal):
    for rank, (peak, q, k) in enumerate(pool.run(peaks, heads, heads_kv, dtype, causal)):
        block = 2 * k  # K and V, or dK and dV
        allowed = 4 * q + 2 * block + 2 * 2 * block  # q, out, dout, dq; k, v, dk, dv; two blocks both ways
        print(f"rank {rank}: {peak / allowed:.3f} of the tensors and two blocks")
        assert peak <= 1.15 * allowed, (rank, peak / allowed)
