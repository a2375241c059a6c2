"""What lists of keys need beyond tensors: memory for lists and rows, never for queries times keys. Each case has a process
of its own, whose largest size is measured; on a GPU torch counts.
"""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

TOKENS, HEADS, DIM, ENTRIES = 32768, 2, 32, 16
CASES = ["key_indices", "key_indices_twice", "key_blocks", "key_blocks_of_queries"]

PROGRAM = """
import json, resource, sys, torch
from flash_attention import attention
tokens, heads, dim, entries, case = json.loads(sys.argv[1])
torch.set_num_threads(2)

def run(tokens):
    q, k, v = (torch.randn(1, tokens, heads, dim).requires_grad_() for _ in range(3))
    queries, keys = {"key_blocks": (1, 64), "key_blocks_of_queries": (16, 64)}.get(case, (1, 1))
    lists = torch.randint(-1, tokens // keys, (1, -(-tokens // queries), 1, entries), dtype=torch.int32)
    if case == "key_indices_twice":
        lists[..., 1:] = lists[..., :1]
    given = {"key_indices": lists} if keys == 1 else {"key_blocks": lists, "key_block_size": (queries, keys)}
    out, lse = attention(q, k, v, causal=True, **given, return_lse=True)
    (out.sum() + lse.clamp(min=-9).sum()).backward()
    tensors = [q, k, v, q.grad, k.grad, v.grad, out, lse]
    return sum(x.numel() * x.element_size() for x in tensors), lists.numel() * 4

run(512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tensors, lists = run(tokens)
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10, tensors, lists]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
@pytest.mark.parametrize("case", CASES)
def test_on_the_cpu(case):
    """A byte for each pair of query and key would be 1 GiB, scores 8 GiB."""
    given = json.dumps([TOKENS, HEADS, DIM, ENTRIES, case])
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, tensors, lists = json.loads(done.stdout)
    rows = 3 * TOKENS * HEADS * DIM * 4  # sums in float32, and what torch keeps of a gradient while it is added up
    assert peak < tensors + rows + 3 * lists + (48 << 20), (peak >> 20, tensors >> 20, lists >> 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("case", [*CASES, "latent"])
def test_on_a_gpu(case):
    """Twice as many tokens need twice the memory, and hardly more than tensors, lists and rows."""
    from flash_attention import attention, flash_mla

    def peak(tokens):
        torch.cuda.empty_cache()
        if case == "latent":
            q, kv = (torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16) for heads in (16, 1))
            lists = torch.randint(0, tokens, (tokens, 1, ENTRIES), device="cuda", dtype=torch.int32)
            tensors = [q.numel() * 2]
        else:
            q, k, v = (torch.randn(1, tokens, HEADS, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            queries, keys = {"key_blocks": (1, 128), "key_blocks_of_queries": (64, 64)}.get(case, (1, 1))
            lists = torch.randint(-1, tokens // keys, (1, tokens // queries, 1, ENTRIES), device="cuda", dtype=torch.int32)
            given = {"key_indices": lists} if keys == 1 else {"key_blocks": lists, "key_block_size": (queries, keys)}
            tensors = [x.requires_grad_().numel() * 2 for x in (q, k, v)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if case == "latent":
            flash_mla.flash_mla_sparse_fwd(q, kv, lists, 0.05)
        else:
            attention(q, k, v, causal=True, **given).float().square().sum().backward()
        return torch.cuda.max_memory_allocated() - before, sum(tensors), lists.numel() * 4

    small, _, _ = peak(16384)
    large, tensors, lists = peak(32768)
    print(f"{case}: {small >> 20} and {large >> 20} MiB beside {tensors >> 20} MiB of tensors, {lists >> 20} of lists")
    assert large < 6 * tensors + 3 * lists + (64 << 20)
    assert large < 2.2 * small + (64 << 20)
