"""What torch's tools see of a call: FLOPs, the profiler, the compiler's count of graphs."""

import pytest
import torch
from flash_attention import attention, attention_over_cache, attention_packed, flash_attn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

BATCH, QUERIES, KEYS, HEADS, DIM, DIM_V = 2, 24, 40, 4, 32, 16
FORWARD = 2 * BATCH * HEADS * QUERIES * KEYS * (DIM + DIM_V)
BACKWARD = 2 * BATCH * HEADS * QUERIES * KEYS * (3 * DIM + 2 * DIM_V)


def inputs(device, grad=False, layout="bshd"):
    shapes = [(BATCH, QUERIES, HEADS, DIM), (BATCH, KEYS, 2, DIM), (BATCH, KEYS, 2, DIM_V)]
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    tensors = [tensor.transpose(1, 2) if layout == "bhsd" else tensor for tensor in tensors]
    return [tensor.requires_grad_(grad) for tensor in tensors]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_flops(layout, device):
    leaves = inputs(device, grad=True, layout=layout)
    with FlopCounterMode(display=False) as counter:
        out = attention(*leaves, layout=layout)
    assert counter.get_total_flops() == FORWARD
    with counter:
        out.sum().backward()
    assert counter.get_total_flops() == BACKWARD
    with counter, torch.no_grad():
        attention(*leaves, causal=True, layout=layout)
    assert counter.get_total_flops() == FORWARD


def test_flops_are_those_of_torch(device):
    q, k, v = (torch.randn(BATCH, HEADS, QUERIES, DIM, device=device, requires_grad=True) for _ in range(3))
    totals = []
    for call in (
        lambda: attention(q, k, v, layout="bhsd"),
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    ):
        with FlopCounterMode(display=False) as counter:
            call().sum().backward()
        totals.append(counter.get_total_flops())
    if totals[1]:  # some builds of torch do not count their CPU kernel
        assert totals[0] == totals[1]
    assert totals[0] == 2 * BATCH * HEADS * QUERIES * QUERIES * DIM * 7


def test_flops_of_packed_sequences(device):
    starts = torch.tensor([0, 3, 3, 13], dtype=torch.int32, device=device)
    q = torch.randn(13, HEADS, DIM, device=device)
    with FlopCounterMode(display=False) as counter:
        attention_packed(q, q, q, starts, causal=True)
    assert counter.get_total_flops() == 2 * HEADS * (9 + 100) * 2 * DIM


@pytest.mark.parametrize(("page_size", "packed"), [(0, False), (4, False), (4, True)], ids=["dense", "pages", "packed"])
def test_flops_over_a_cache(page_size, packed, device):
    used = torch.tensor([5, 0, 12], dtype=torch.int32, device=device)
    queries = [1, 3, 2] if packed else [2, 2, 2]
    shape = (12, page_size, 2) if page_size else (3, 16, 2)
    k, v = torch.randn(*shape, DIM, device=device), torch.randn(*shape, DIM_V, device=device)
    options = {"seqused_kv": used}
    if page_size:
        options["page_table"] = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    q = torch.randn(*((6,) if packed else (3, 2)), HEADS, DIM, device=device)
    if packed:
        options |= {"cu_seqlens_q": torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=device), "max_seqlen_q": 3}
    with FlopCounterMode(display=False) as counter:
        attention_over_cache(q, k, v, causal=True, **options)
    scores = HEADS * sum(n * keys for n, keys in zip(queries, used.tolist(), strict=True))
    assert counter.get_total_flops() == 2 * scores * (DIM + DIM_V)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_profiler_sees_plain_calls(grad, device):
    q, k, v = (torch.randn(BATCH, QUERIES, HEADS, DIM, device=device, requires_grad=grad) for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        out = attention(q, k, v)
        flash_attn.flash_attn_func(q, k, v)
        if grad:
            out.sum().backward()
    events = {event.key: event for event in trace.key_averages(group_by_input_shape=True)}
    assert events["flash_attention::forward"].count == 2
    assert events["flash_attention::forward"].input_shapes[0] == list(q.shape)
    assert ("flash_attention::backward" in events) == grad


def test_no_more_graphs_for_more_lengths(device):
    """Without dynamic=True: one graph for the first length, one for any other."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True, window=(9, 0)), backend=counter, fullgraph=True
    )
    for seq in (16, 24, 40, 57, 128):
        leaves = [torch.randn(2, seq, 2, 16, device=device, requires_grad=True) for _ in range(3)]
        expected = attention(*leaves, causal=True, window=(9, 0))
        out = compiled(*leaves)
        torch.testing.assert_close(out, expected)
        for ours, theirs in zip(
            torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
        ):
            torch.testing.assert_close(ours, theirs)
    assert counter.frame_count == 2


COUNTED_LATER = """
import sys, torch
from flash_attention import attention
q = torch.randn(1, 8, 2, 16)
before = set(sys.modules)
attention(q, q, q)
new = set(sys.modules) - before
assert "torch.utils.flop_counter" not in new and "triton" not in new, "a first call imports Triton"
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    attention(q, q, q)
assert counter.get_total_flops() == 4 * 2 * 8 * 8 * 16, counter.get_total_flops()
"""


def test_the_counter_may_come_later(warm_python):
    """torch's module of it imports Triton: that is no part of a program's first call."""
    done = warm_python("-c", COUNTED_LATER)
    assert done.returncode == 0, done.stderr[-2000:]
