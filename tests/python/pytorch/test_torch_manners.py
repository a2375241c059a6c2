"""How the ops behave among torch's own: tracing, export, autocast, checkpointing, misuse."""

import inspect

import flash_attention
import pytest
import torch
from flash_attention import attention, attention_packed, flash_attn, flashinfer
from flash_attention.arguments.options import binding_arguments
from flash_attention.options import NUM_TENSORS
from torch.utils.checkpoint import checkpoint


def tensors(device, *, grad=False, dtype=torch.float32, batch=2, seq=24):
    return [torch.randn(batch, seq, 2, 16, device=device, dtype=dtype).requires_grad_(grad) for _ in range(3)]


OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "window": (4, 0)},
    "dropout": {"dropout_p": 0.5, "seed": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_compile(name, device):
    torch._dynamo.reset()

    def step(q, k, v):
        out, lse = attention(q, k, v, return_lse=True, **OPTIONS[name])
        return out.square().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    eager_inputs = tensors(device, grad=True)
    inputs = [tensor.detach().clone().requires_grad_() for tensor in eager_inputs]
    step(*eager_inputs).backward()
    compiled(*inputs).backward()
    for ours, theirs in zip(inputs, eager_inputs, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_compile_dynamic_shapes_with_inductor(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True) * 2, fullgraph=True, dynamic=True)
    for seq in (16, 24, 40):
        inputs = tensors(device, seq=seq)
        torch.testing.assert_close(compiled(*inputs), attention(*inputs, causal=True) * 2)


def test_compile_with_a_symbolic_scale(device):
    """FlashAttention's entry computes 1 / sqrt(head_dim) itself; where sizes vary that is no number yet."""
    torch._dynamo.reset()
    step = lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True)  # noqa: E731
    inputs = tensors(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), attention(*inputs, causal=True))


def test_compile_with_bias_mask_and_sink(device):
    torch._dynamo.reset()
    q, k, v = tensors(device, grad=True)
    bias = torch.randn(1, 2, 24, 24, device=device, requires_grad=True)
    sink = torch.randn(2, device=device, requires_grad=True)
    mask = torch.rand(24, 24, device=device) > 0.3

    def step(q, k, v, bias, sink):
        return attention(q, k, v, bias=bias, sink=sink, mask=mask, layout="bhsd" if q.shape[1] == 2 else "bshd").sum()

    inputs = (q, k, v, bias, sink)
    eager = torch.autograd.grad(step(*inputs), inputs)
    traced = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for a, b in zip(eager, traced, strict=True):
        torch.testing.assert_close(a, b)


def test_compile_with_graph_replay(device):
    """mode="reduce-overhead": CUDA graphs on a GPU, a plain compiled call on a CPU."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True) + 1, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        inputs = tensors(device)
        torch.testing.assert_close(compiled(*inputs).clone(), attention(*inputs, causal=True) + 1)


def test_compile_packed(device):
    torch._dynamo.reset()
    q = torch.randn(30, 2, 16, device=device)
    cu_seqlens = torch.tensor([0, 10, 30], dtype=torch.int32, device=device)
    compiled = torch.compile(lambda q, cu: attention_packed(q, q, q, cu, causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, cu_seqlens), attention_packed(q, q, q, cu_seqlens, causal=True))


def test_export(device):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True)

    inputs = tuple(tensors(device))
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Model(), inputs, dynamic_shapes=({0: batch}, {0: batch}, {0: batch}))
    assert "flash_attention.forward" in str(program.graph)
    more = tuple(tensors(device, batch=5))
    torch.testing.assert_close(program.module()(*more), attention(*more, causal=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck(name, device):
    bound = inspect.signature(attention).bind(*tensors(device), **OPTIONS[name])
    bound.apply_defaults()
    slots, options = binding_arguments(bound.arguments)
    slots = slots[:NUM_TENSORS]
    torch.library.opcheck(torch.ops.flash_attention.forward.default, (*slots, *options, 3, 0))
    out, lse, rng_state = torch.ops.flash_attention.forward(*slots, *options, 3, 0)
    arguments = (*slots, *options, out, lse, rng_state, torch.randn_like(out), None, False, False)
    torch.library.opcheck(torch.ops.flash_attention.backward.default, arguments)


def test_autocast(device):
    inputs = tensors(device, grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(*inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, attention(*(tensor.bfloat16() for tensor in inputs)))
    out.float().sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in inputs)
    with torch.autocast(device, dtype=torch.float16):  # as torch's own does
        assert attention(*(tensor.bfloat16() for tensor in inputs)).dtype == torch.float16


def test_checkpoint_replays_dropout(device):
    inputs = tensors(device, grad=True)
    torch.manual_seed(7)
    plain = torch.autograd.grad(attention(*inputs, dropout_p=0.5).square().sum(), inputs)
    torch.manual_seed(7)
    out = checkpoint(lambda *t: attention(*t, dropout_p=0.5), *inputs, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(out.square().sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_misuse_gives_torchs_errors(device):
    inputs = tensors(device, grad=True)
    out = attention(*inputs)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    middle = inputs[0] * 1
    out = attention(middle, *inputs[1:])
    middle.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_lse_alone_is_differentiable(device):
    q, k, v = tensors(device, grad=True)
    _, lse = attention(q, k, v, return_lse=True)
    lse.sum().backward()
    scores = torch.einsum("bihd,bjhd->bhij", q.detach(), k.detach()) * 16**-0.5
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), k.detach()) * 16**-0.5
    torch.testing.assert_close(q.grad, expected, atol=1e-5, rtol=1e-4)
    assert v.grad.abs().max() == 0


def test_frozen_inputs_get_no_gradient(device):
    q, k, v = tensors(device)
    k.requires_grad_()
    attention(q, k, v).sum().backward()
    assert k.grad is not None
    assert q.grad is None


def test_explain_and_compile(device):
    q, k, v = tensors(device)
    text = flash_attention.explain(q, k, v, causal=True)
    names = {kernel["name"] for kernel in flash_attention.kernels()}
    assert any(name in text for name in names)
    flash_attention.compile(q, k, v, causal=True, backward=True)
    assert flash_attention.explain(q[0], k[0], v[0], cu_seqlens_q=torch.tensor([0, 24], dtype=torch.int32, device=device))


DEFAULT_DEVICE = {
    "dropout": lambda q: attention(q, q, q, dropout_p=0.3),
    "dropout of a program": lambda q: attention(q, q, q, dropout_p=0.3, score_mod=lambda s, b, h, i, j: s * 2),
    "probabilities": lambda q: flash_attn.flash_attn_func(q, q, q, 0.3, return_attn_probs=True)[2],
    "rotation": lambda q: flash_attention.rotate(q),
    "slopes": lambda q: flashinfer.single_decode_with_kv_cache(q[0, 0], q[0], q[0], pos_encoding_mode="ALIBI"),
    "flashmask": lambda q: flash_attention.flashmask_attention(q, q, q, dropout=0.3, causal=True),
    "tree": lambda q: flash_attention.masks.tree([-1, 0], [2, 3], device="cpu").hidden_rows,
    "pages": lambda q: flash_attn.flash_attn_varlen_func(
        q[0], q, q, STARTS, STARTS, 8, 8, block_table=STARTS[:1, None], dropout_p=0.3
    ),
}
STARTS = torch.tensor([0, 8], dtype=torch.int32)


@pytest.mark.parametrize("name", DEFAULT_DEVICE)
def test_the_default_device_is_the_readers(name):
    """torch.set_default_device() is about the new tensors of the caller, not about what the library draws and counts."""
    q = torch.randn(1, 8, 2, 16)
    torch.manual_seed(5)
    expected = DEFAULT_DEVICE[name](q)
    torch.manual_seed(5)
    with torch.device("meta"):
        found = DEFAULT_DEVICE[name](q)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_cuda_graph_and_side_stream():
    inputs = tensors("cuda", dtype=torch.float16)
    expected = attention(*inputs, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        side = attention(*inputs, causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(side, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(*inputs, causal=True)
    inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    assert torch.equal(captured, attention(*inputs, causal=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_cuda_graph_of_forward_and_backward():
    leaves = tensors("cuda", grad=True, dtype=torch.float16, seq=200)
    dout = torch.randn_like(leaves[0])

    def step():
        out = attention(*leaves, causal=True)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # kernels are compiled and loaded before a capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    for replayed, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(replayed, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_compiled_training_step_with_cuda_graphs():
    torch._dynamo.reset()
    layer = torch.nn.Linear(64, 192, device="cuda", dtype=torch.bfloat16)

    def loss(x):
        q, k, v = layer(x).unflatten(-1, (3, 2, 32)).unbind(2)
        return attention(q, k, v, causal=True).float().square().sum()

    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    (expected,) = torch.autograd.grad(loss(x), [layer.weight])
    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):  # the first two record
        (found,) = torch.autograd.grad(compiled(x), [layer.weight])
    torch.testing.assert_close(found, expected, atol=0.02 * expected.abs().max().item(), rtol=2e-2)
