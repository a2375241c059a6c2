"""Attention whose heads are cut across processes; torch's API where they divide evenly, 6 heads on 4 processes, too.

torchrun --nproc-per-node 4 examples/tensor_parallel.py --heads 6 --heads-kv 2
"""

import argparse

import torch
import torch.distributed as dist
from flash_attention import attention
from flash_attention.parallel import head_ranges
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import linear


class SelfAttention(nn.Module):
    """Causal attention over whatever heads its projections give."""

    def __init__(self, heads, heads_kv, head_dim):
        super().__init__()
        self.dim, width = head_dim, heads * head_dim
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, heads_kv * head_dim, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, self.dim)) for project in (self.q, self.k, self.v))
        return self.out(attention(q, k, v, causal=True).flatten(2))


def uneven(module, x, heads, heads_kv, mesh):
    """Any number of heads: a process takes the rows of the projections that belong to its heads; the rest is a sum."""
    total = torch.zeros_like(x)
    for ranges in head_ranges(heads, heads_kv, mesh.size(), mesh.get_local_rank()):
        rows_q, rows_kv = (slice(low * module.dim, high * module.dim) for low, high in ranges)
        weights = module.q.weight[rows_q], module.k.weight[rows_kv], module.v.weight[rows_kv]
        q, k, v = (linear(x, weight).unflatten(-1, (-1, module.dim)) for weight in weights)
        total += linear(attention(q, k, v, causal=True).flatten(2), module.out.weight[:, rows_q])
    dist.all_reduce(total, group=mesh.get_group())
    return total


@torch.no_grad()
def results(mesh, heads, heads_kv, head_dim=16):
    """(what the processes compute together, what one computes for itself)"""
    torch.manual_seed(0)
    module, x = SelfAttention(heads, heads_kv, head_dim), torch.randn(2, 32, heads * head_dim)
    alone = module(x)
    if heads_kv % mesh.size():
        return uneven(module, x, heads, heads_kv, mesh), alone
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel()}
    return parallelize_module(module, mesh, plan)(x), alone


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("heads", 6), ("heads-kv", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    parallel, alone = results(init_device_mesh("cpu", (dist.get_world_size(),)), given.heads, given.heads_kv)
    print(f"rank {dist.get_rank()}: largest difference to one process {(parallel - alone).abs().max():.1e}")
    dist.destroy_process_group()
