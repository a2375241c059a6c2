"""Masks that serve many calls: what a GPU found out about them is kept, and found out anew where they have changed."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from flash_attention import attention, attention_packed, create_block_mask, flex_attention, masks
from flash_attention.flex import block_mask
from torch.nn.attention import flex_attention as torch_flex

HEADS, GROUPS, LENGTH, DIM = 8, 2, 384, 64


def is_gpu(device):
    return device == "cuda"


def inputs(device, rows=LENGTH, keys=LENGTH, seed=0):
    """q, k, v and dout, [1, heads, length, dim]; float16 on a GPU, for its fast kernels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, HEADS, rows, DIM), (1, GROUPS, keys, DIM), (1, GROUPS, keys, DIM), (1, HEADS, rows, DIM)
    dtype = torch.float16 if is_gpu(device) else torch.float32
    q, k, v, dout = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def check(result, q, k, v, dout, visible):
    """Output and gradients against the dense formula in float64."""
    got = [result, *torch.autograd.grad(result, (q, k, v), dout)]
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    keys, values = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in exact[1:])
    scores = (exact[0] @ keys.transpose(-1, -2) / math.sqrt(DIM)).masked_fill(~visible.to(q.device), -math.inf)
    out = torch.softmax(scores, -1).nan_to_num() @ values
    wanted = [out, *torch.autograd.grad(out, exact, dout.double())]
    tolerance = 4e-3 if q.dtype == torch.float16 else 3e-5
    for name, one, other in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        size = max(1.0, other.abs().max().item())
        assert (one.double() - other).abs().max().item() <= tolerance * size, name


def matrix(mask_mod, rows=LENGTH, keys=LENGTH, device="cpu"):
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(keys, device=device)[None, :]
    return torch.broadcast_to(mask_mod(0, 0, i, j), (rows, keys))


def documents(device):
    ids = torch.arange(LENGTH, device=device) // 100

    def same_document(b, h, i, j):
        return (ids[i] == ids[j]) & (i >= j)

    return ids, same_document


def test_a_block_mask_is_found_out_once(device):
    _, mask_mod = documents(device)
    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
    visible = matrix(mask_mod, device=device)
    for layer in range(3):
        q, k, v, dout = inputs(device, seed=layer)
        check(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), q, k, v, dout, visible)
    assert mask.kept.made == (2 if is_gpu(device) else 0), "forward and backward"
    assert len(mask.kept) == mask.kept.made


def test_so_is_a_block_mask_of_torch(device):
    _, mask_mod = documents(device)
    mask = torch_flex.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device)
    visible = matrix(mask_mod, device=device)
    for layer in range(3):
        q, k, v, dout = inputs(device, seed=layer)
        check(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), q, k, v, dout, visible)
    kept = block_mask.kept_of(mask)
    assert kept.made == (2 if is_gpu(device) else 0)
    mask.full_kv_num_blocks.zero_()  # a table of its own is made of it
    mask.kv_num_blocks.zero_()
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert not out.any()


def test_a_captured_tensor_that_changes_is_seen(device):
    ids, mask_mod = documents(device)
    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
    for n in range(3):
        ids.copy_(torch.arange(LENGTH) // (70 + 30 * n))
        q, k, v, dout = inputs(device)
        check(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), q, k, v, dout, matrix(mask_mod, device=device))
        assert mask.kept.made == (2 * (n + 1) if is_gpu(device) else 0)
    assert len(mask.kept) == (2 if is_gpu(device) else 0), "the state before is not kept"


def test_a_tensor_behind_the_same_name_is_another(device):
    state = {"ids": torch.arange(LENGTH, device=device) // 100}

    def make(ids):
        return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)

    mask = create_block_mask(make(state["ids"]), None, None, LENGTH, LENGTH)
    for size in (100, 150, 64):  # memory that was let go of comes back at the same address
        state["ids"] = torch.arange(LENGTH, device=device) // size
        mask.mask_mod = make(state["ids"])
        q, k, v, dout = inputs(device)
        visible = matrix(mask.mask_mod, device=device)
        check(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), q, k, v, dout, visible)
        mask.mask_mod = None
        state.clear()


def test_a_number_that_changes_is_seen(device):
    window = 100

    def mask_mod(b, h, i, j):
        return ((i - j).abs() <= window) | (j % 128 == 5)

    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
    for size in (100, 20, 100):
        window = size
        q, k, v, dout = inputs(device)
        check(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), q, k, v, dout, matrix(mask_mod, device=device))
    assert mask.kept.made == (4 if is_gpu(device) else 0), "a number that comes back finds its mask"


def test_each_size_has_its_own(device):
    def mask_mod(b, h, i, j):
        return (i >= j) & (j % 3 != 1)

    mask = create_block_mask(mask_mod)
    for rows, keys in ((LENGTH, LENGTH), (130, 270), (LENGTH, LENGTH)):
        q, k, v, dout = inputs(device, rows, keys)
        visible = matrix(mask_mod, rows, keys)
        check(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), q, k, v, dout, visible)
    assert mask.kept.made == (4 if is_gpu(device) else 0)


def test_what_a_score_reads_hides_nothing(device):
    """A bias that is trained: the mask is the same in every step."""
    _, mask_mod = documents(device)
    bias = torch.zeros(HEADS, device=device, requires_grad=True)
    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
    for _ in range(3):
        q, k, v, dout = inputs(device)
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h] * (i - j), mask, enable_gqa=True)
        (out * dout).sum().backward()
        assert bias.grad.isfinite().all()
        with torch.no_grad():
            bias.sub_(1e-3 * bias.grad)
    assert mask.kept.made == (2 if is_gpu(device) else 0)


def test_captured_tensors_that_must_be_copied_are_not_kept(device):
    ids = torch.arange(LENGTH, device=device)[:, None].expand(-1, 2).contiguous()[:, 0] // 100

    def mask_mod(b, h, i, j):
        return ids[i] == ids[j]

    ids = torch.stack([ids, ids], 1)[:, 0]  # with gaps
    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
    for size in (100, 50):
        ids.copy_(torch.arange(LENGTH) // size)
        q, k, v, dout = inputs(device)
        check(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), q, k, v, dout, matrix(mask_mod, device=device))
    assert mask.kept.made == 0


def test_tensors_without_versions_are_not_kept(device):
    with torch.inference_mode():
        ids, mask_mod = documents(device)
        mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
        q, k, v, _ = (tensor.detach() for tensor in inputs(device))
        first = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        ids.fill_(1)
        second = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert not torch.equal(first, second)
    assert mask.kept.made == 0


def test_a_copy_begins_anew(device):
    _, mask_mod = documents(device)
    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
    q, k, v, dout = inputs(device)
    check(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), q, k, v, dout, matrix(mask_mod, device=device))
    for other in (copy.copy(mask.kept), copy.deepcopy(mask).kept):
        assert other.made == len(other) == 0
    again = flex_attention(q, k, v, block_mask=copy.deepcopy(mask), enable_gqa=True)
    assert torch.equal(again, flex_attention(q, k, v, block_mask=mask, enable_gqa=True))


def data_masks(device):
    """name -> (keyword, mask, the matrix of what it shows)."""
    intervals = masks.documents([0, 100, 290, LENGTH], device=device)
    visible = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.3
    visible[:, 128:256] = False
    blocks = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], device=device).bool()
    return {
        "intervals": ("hidden_rows", intervals, intervals.visible()[0, 0]),
        "rows": ("hidden_rows", masks.documents([0, LENGTH], device=device).hidden_rows, torch.ones(LENGTH, LENGTH).bool()),
        "bool": ("mask", visible.to(device), visible),
        "blocks": (
            "block_mask",
            masks.BlockMask(blocks[None, None], (128, 128)),
            blocks.repeat_interleave(128, 0).repeat_interleave(128, 1),
        ),
    }


@pytest.mark.parametrize("name", ["intervals", "rows", "bool", "blocks"])
def test_masks_that_are_data(device, name):
    keyword, mask, visible = data_masks(device)[name]
    prepared = masks.prepare(mask)
    q, k, v, _ = inputs(device)
    with torch.no_grad():
        attention(q, k, v, layout="bhsd", **{keyword: prepared})
    assert prepared.made == int(is_gpu(device))
    for layer in range(2):
        q, k, v, dout = inputs(device, seed=layer)
        given = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        out = attention(*given, **{keyword: prepared})
        assert torch.equal(out, attention(*given, **{keyword: mask})), "the same bits"
        check(out.transpose(1, 2), q, k, v, dout, visible)
    assert prepared.made == (2 if is_gpu(device) else 0)
    assert masks.prepare(prepared) is prepared


@pytest.mark.parametrize("name", ["intervals", "bool"])
def test_torch_compile_takes_them(device, name):
    keyword, mask, _ = data_masks(device)[name]
    prepared = masks.prepare(mask)
    q, k, v, _ = inputs(device)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, layout="bhsd", **{keyword: prepared}), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q, k, v), attention(q, k, v, layout="bhsd", **{keyword: mask}))


def test_hidden_rows_that_change_are_seen(device):
    mask = masks.documents([0, 100, 290, LENGTH], device=device)
    prepared = masks.prepare(mask)
    for bounds in ([0, 50, LENGTH], [0, 200, 201, LENGTH]):
        other = masks.documents(bounds, device=device)
        mask.hidden_rows.copy_(other.hidden_rows)
        q, k, v, dout = inputs(device)
        out = attention(q, k, v, layout="bhsd", hidden_rows=prepared)
        check(out, q, k, v, dout, other.visible()[0, 0])
    assert prepared.made == (4 if is_gpu(device) else 0)


def test_beside_a_mask_that_is_not_prepared_nothing_is_kept(device):
    _, mask, visible = data_masks(device)["bool"]
    prepared, bools = masks.prepare(masks.documents([0, 100, LENGTH], device=device)), mask.clone()
    for other in (False, True):
        bools.copy_(mask ^ other)
        q, k, v, dout = inputs(device)
        out = attention(q, k, v, layout="bhsd", hidden_rows=prepared, mask=bools)
        check(out, q, k, v, dout, prepared.mask.visible()[0, 0].cpu() & (visible ^ other))
    out = attention(q, k, v, layout="bhsd", hidden_rows=prepared, mask_mod=lambda b, h, i, j: j % 2 == 0)
    even = torch.arange(LENGTH) % 2 == 0
    check(out, q, k, v, dout, prepared.mask.visible()[0, 0].cpu() & even)
    assert prepared.made == 0


def test_prepared_masks_of_packed_sequences(device):
    prepared = masks.prepare(masks.documents([0, 100, 290, LENGTH], device=device).hidden_rows[0])
    lengths = torch.tensor([0, 150, LENGTH], dtype=torch.int32, device=device)
    q, k, v, _ = inputs(device)
    given = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
    for split in (150, 60):
        lengths[1] = split
        out = attention_packed(*given, lengths, hidden_rows=prepared, causal=True, max_seqlen_q=LENGTH)
        again = attention_packed(*given, lengths, hidden_rows=prepared, causal=True, max_seqlen_q=LENGTH)
        raw = attention_packed(*given, lengths, hidden_rows=prepared.mask, causal=True, max_seqlen_q=LENGTH)
        assert torch.equal(out, raw) and torch.equal(again, raw)
    assert prepared.made == (2 if is_gpu(device) else 0), "lengths are of the mask, too"


def test_other_things_are_refused():
    for wrong in (3, torch.zeros(3), lambda b, h, i, j: i >= j):
        with pytest.raises(TypeError, match=r"^mask: expected an IntervalMask"):
            masks.prepare(wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_each_stream_has_its_own():
    """A mask that one stream prepares is not read by another, which may be ahead of it."""
    _, mask_mod = documents("cuda")
    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
    visible = matrix(mask_mod, device="cuda")
    q, k, v, dout = inputs("cuda")
    torch.cuda.synchronize()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(50_000_000)
        first = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    with torch.cuda.stream(other):
        second = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        check(second, q, k, v, dout, visible)
    torch.cuda.synchronize()
    assert torch.equal(first, second)
    assert mask.kept.made == 3, "two forward, one backward"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("kind", ["program", "intervals"])
def test_a_cuda_graph_prepares_the_mask_itself(kind):
    ids, mask_mod = documents("cuda")
    program = create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
    intervals = masks.prepare(masks.documents([0, 100, 200, 300, LENGTH], device="cuda"))
    q, k, v, dout = inputs("cuda")

    def call():
        if kind == "program":
            return flex_attention(q, k, v, block_mask=program, enable_gqa=True)
        return attention(q, k, v, layout="bhsd", hidden_rows=intervals)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(call(), (q, k, v), dout)
    torch.cuda.current_stream().wait_stream(side)
    made = program.kept.made + intervals.made
    assert made == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    for bounds in ([0, 100, 200, 300, LENGTH], [0, 60, LENGTH]):
        other = masks.documents(bounds, device="cuda")
        starts = torch.zeros(LENGTH, dtype=torch.long)
        starts[bounds[1:-1]] = 1
        ids.copy_(starts.cumsum(0))
        intervals.mask.hidden_rows.copy_(other.hidden_rows)
        graph.replay()
        torch.cuda.synchronize()
        expected = attention(q, k, v, layout="bhsd", hidden_rows=other)
        assert torch.allclose(out, expected, atol=2e-3)
        wanted = torch.autograd.grad(expected, (q, k, v), dout)
        for one, two in zip(gradients, wanted, strict=True):
            assert torch.allclose(one, two, atol=1e-2)
    assert program.kept.made + intervals.made == made


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_many_calls_one_after_another():
    """Counters and workspaces of neighbours: 50 calls without a pause, of two masks in turn."""
    q, k, v, _ = inputs("cuda", 1000, 1000)

    def make(size):
        ids = torch.arange(1000, device="cuda") // size
        return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)

    block_masks = [create_block_mask(make(size), None, None, 1000, 1000) for size in (130, 333)]
    expected = [flex_attention(q, k, v, block_mask=mask, enable_gqa=True) for mask in block_masks]
    results = [flex_attention(q, k, v, block_mask=block_masks[n % 2], enable_gqa=True) for n in range(50)]
    for n, result in enumerate(results):
        assert torch.equal(result, expected[n % 2]), n
    assert [mask.kept.made for mask in block_masks] == [1, 1]


def test_a_mask_at_the_end_of_a_program():
    """Nothing is printed about it, where something holds it for longer than the interpreter lives."""
    text = (
        "import ctypes; from flash_attention import _core; kept = _core.KeptMasks(len); "
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == ""
