"""The doors of context parallelism: DeviceMesh, DTensor, torch's own context_parallel, heads cut across processes."""

import sys
from pathlib import Path

import pytest
import torch
from parallel_pool import Pool

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


def whole(heads=4, heads_kv=2):
    torch.manual_seed(5)
    return [torch.randn(2, 32, count, 16, requires_grad=True) for count in (heads, heads_kv, heads_kv)]


def exact(q, k, v):
    """torch's own attention in float64, causal, [batch, seq, heads, dim]."""
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def through_dtensor(group):
    """2 x 2 processes: the batch is cut along one axis of the mesh, the sequence along the other."""
    from flash_attention.parallel import context_attention
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = whole()
    expected = exact(q, k, v)
    expected.sum().backward()
    cut = [distribute_tensor(tensor.detach(), mesh, [Shard(0), Shard(1)]).requires_grad_() for tensor in (q, k, v)]
    out, lse = context_attention(*cut, causal=True, layout="contiguous", return_lse=True)
    out.sum().backward()
    errors = [(out.full_tensor() - expected).abs().max().item()]
    errors += [(a.grad.full_tensor() - b.grad).abs().max().item() for a, b in zip(cut, (q, k, v), strict=True)]
    messages = []
    for wrong in ([Shard(0), Shard(2)], [Shard(1), Shard(1)]):
        q = distribute_tensor(torch.randn(4, 32, 4, 16), mesh, wrong)
        try:
            context_attention(q, q, q)
        except ValueError as error:
            messages.append(str(error))
    return errors, list(lse.full_tensor().shape), messages


def test_dtensor(pool):
    for errors, shape, messages in pool.run(through_dtensor):
        assert max(errors) < 1e-5 and shape == [2, 4, 32]
        assert len(messages) == 2 and all("expected Shard(1), the sequence" in message for message in messages)


def through_mesh(group):
    from flash_attention.parallel import ParallelError, context_attention, split
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    rank = mesh["cp"].get_local_rank()
    q, k, v = (split(tensor.detach(), 2, rank) for tensor in whole())
    out = context_attention(q, k, v, mesh["cp"], causal=True)
    refused = []
    for wrong in (mesh, "cp"):
        try:
            context_attention(q, k, v, wrong)
        except (ValueError, TypeError, ParallelError) as error:
            refused.append(str(error))
    return (out - split(exact(*whole()), 2, rank)).abs().max().item(), refused


def test_device_mesh(pool):
    for error, refused in pool.run(through_mesh):
        assert error < 1e-5
        assert "got a mesh of 2 axes" in refused[0] and "expected a ProcessGroup" in refused[1]


def through_torch(group, load_balance, dtype):
    """torch's context_parallel over scaled_dot_product_attention, forward and backward."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from flash_attention.parallel import register_context_parallel, split, unregister_context_parallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention

    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in whole(4, 4))
    expected = exact(q, k, v)
    expected.sum().backward()
    buffers = [tensor.detach().transpose(1, 2).contiguous() for tensor in (q, k, v)]
    register_context_parallel()
    _attention._cp_options.enable_load_balance = load_balance
    layout = "zigzag" if load_balance else "contiguous"
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            cut = [buffer.clone().requires_grad_() for buffer in buffers]
            out = F.scaled_dot_product_attention(*cut, is_causal=True)
            out.sum().backward()
    finally:
        _attention._cp_options.enable_load_balance = True
        unregister_context_parallel()
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(cut, (q, k, v), strict=True))]
    return [(a - split(b, world, rank, layout=layout).transpose(1, 2)).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize("load_balance,dtype", [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_torchs_own_entry(pool, load_balance, dtype):
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")
    for errors in pool.run(through_torch, load_balance, dtype):
        assert max(errors) < (1e-5 if dtype == torch.float32 else 6e-2), errors


def tensor_parallel(group, folder, heads, heads_kv):
    sys.path.insert(0, folder)
    import tensor_parallel
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    parallel, alone = tensor_parallel.results(init_device_mesh("cpu", (dist.get_world_size(group),)), heads, heads_kv)
    return (parallel - alone).abs().max().item()


@pytest.mark.parametrize("heads,heads_kv", [(8, 4), (6, 2), (6, 6), (3, 1)])
def test_heads_cut_across_processes(pool, heads, heads_kv):
    for error in pool.run(tensor_parallel, str(EXAMPLES), heads, heads_kv):
        assert error < 1e-5


def with_autocast(group):
    import torch.distributed as dist
    from flash_attention.parallel import context_attention, split

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    q, k, v = (split(tensor, world, rank) for tensor in whole())
    with torch.autocast("cpu", torch.bfloat16):
        out = context_attention(q, k, v.bfloat16(), group, causal=True)
    out.float().sum().backward()
    return str(out.dtype), (out.double() - split(exact(*whole()), world, rank)).abs().max().item()


def test_autocast(pool):
    for dtype, error in pool.run(with_autocast, ranks=2):
        assert dtype == "torch.bfloat16" and error < 3e-2


def with_strides(group):
    """Rows, heads and dim of [batch, heads, dim, rows] memory: the last stride is not 1."""
    import torch.distributed as dist
    from flash_attention.parallel import context_attention, split

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    q, k, v = (split(tensor.detach(), world, rank) for tensor in whole())
    q = q.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if rank else q
    out = context_attention(q, k, v, group, causal=True, method="ring")
    return (out - split(exact(*whole()), world, rank)).abs().max().item()


def test_any_strides(pool):
    assert max(pool.run(with_strides, ranks=2)) < 1e-5


def alone(group):
    """A group of one: the plain call, bit for bit."""
    from flash_attention import attention
    from flash_attention.parallel import context_attention

    q, k, v = whole()
    with pytest.raises(ValueError, match="method: got 'tree'"):
        context_attention(q, k, v, group, method="tree")
    options = {"causal": True, "dropout_p": 0.2, "seed": 3, "return_lse": True}
    found, expected = context_attention(q, k, v, group, **options), attention(q, k, v, **options)
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_group_of_one(pool):
    assert pool.run(alone, ranks=1) == [True]


def second_derivative(group, method):
    from flash_attention.parallel import context_attention

    q, k, v = (torch.randn(1, 16, 2, 16, requires_grad=True) for _ in range(3))
    out = context_attention(q, k, v, group, causal=True, method=method)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    try:
        (gradient**2).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_second_derivatives_are_refused(pool, method):
    messages = pool.run(second_derivative, method, ranks=2)
    assert all("second derivatives are not computed" in message or "once_differentiable" in message for message in messages)
