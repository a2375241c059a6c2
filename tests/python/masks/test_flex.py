"""flex_attention against the dense formula in float64: mods of attention-gym, their gradients, and what they capture."""

import math

import flash_attention
import pytest
import torch
from flash_attention import and_masks, create_block_mask, flex_attention, or_masks
from flash_attention.flex import program
from flex_formula import BATCH, DIM, HEADS, KEYS, ROWS, compare, dense, over_all, tensors

WIDTH = 12  # of an image, for masks in two dimensions


slopes = torch.tensor([2.0 ** -(h + 1) for h in range(HEADS)])
relative = torch.linspace(-1, 1, ROWS + KEYS - 1)
documents = torch.tensor([[n // 31 for n in range(KEYS)], [n // 50 for n in range(KEYS)]])
distances = torch.randint(0, 6, (KEYS, KEYS), generator=torch.Generator().manual_seed(2))
by_distance = torch.linspace(-2, 1, 6)
prefixes = torch.tensor([20, 65], dtype=torch.int32)


def causal(b, h, i, j):
    return i >= j


def neighbourhood(b, h, i, j):
    x, y, u, w = i % WIDTH, i // WIDTH, j % WIDTH, j // WIDTH
    x, y = x.clamp(2, WIDTH - 3), y.clamp(2, WIDTH - 3)
    return ((x - u).abs() <= 2) & ((y - w).abs() <= 2)


def sliding_tile(b, h, i, j):
    x, y, u, w = (i % WIDTH) // 4, (i // WIDTH) // 4, (j % WIDTH) // 4, (j // WIDTH) // 4
    return ((x - u).abs() <= 1) & ((y - w).abs() <= 0)


def block_diffusion(b, h, i, j):
    half, block = 45, 5
    noisy_i, noisy_j = i < half, j < half
    block_i, block_j = torch.where(noisy_i, i, i - half) // block, torch.where(noisy_j, j, j - half) // block
    own = (block_i == block_j) & (noisy_i == noisy_j)
    return own | (noisy_i & ~noisy_j & (block_i > block_j)) | (~noisy_i & ~noisy_j & (block_i >= block_j))


MODS = {
    "alibi": (lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), None),
    "softcap": (lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0), causal),
    "relative bias": (lambda s, b, h, i, j: s + relative[i - j + KEYS - 1], None),
    "relative position": (lambda s, b, h, i, j: s + (i - j), causal),
    "graphormer": (lambda s, b, h, i, j: s + by_distance[distances[i, j]], None),
    "activation": (lambda s, b, h, i, j: torch.nn.functional.silu(s) + torch.sqrt(torch.sigmoid(s)), None),
    "sandwich": (lambda s, b, h, i, j: s + torch.cos((i - j) * 0.3) * torch.exp(-0.1 * s.abs()), None),
    "checkerboard": (lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, s * 0.5, s), None),
    "hidden by -inf": (lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf), None),
    "causal": (None, causal),
    "window": (None, lambda b, h, i, j: (i >= j) & (i - j <= 17)),
    "documents": (None, lambda b, h, i, j: (documents[b, i] == documents[b, j]) & (i >= j)),
    "prefix": (None, lambda b, h, i, j: (j < prefixes[b]) | (i >= j)),
    "dilated": (None, lambda b, h, i, j: ((i - j).abs() <= 30) & ((i - j) % 3 == 0)),
    "neighbourhood": (None, neighbourhood),
    "sliding tile": (None, sliding_tile),
    "block diffusion": (None, block_diffusion),
    "shared prefix": (None, and_masks(causal, or_masks(lambda b, h, i, j: j < 16, lambda b, h, i, j: i // 40 == j // 40))),
    "heads differ": (lambda s, b, h, i, j: s * (h + 1), lambda b, h, i, j: (j % HEADS == h) | (h == 0)),
    "nothing": (None, lambda b, h, i, j: (i < 50) & (j < 0)),
    "one row": (None, lambda b, h, i, j: i == 70),
}


@pytest.mark.parametrize("name", MODS)
def test_mods(name):
    compare(*MODS[name])


def test_scores_that_are_options():
    """As many queries as keys: ALiBi and a soft cap become options of the library."""

    def capped(cap):
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)

    slopes_of_batch = slopes * torch.tensor([[1.0], [0.5]])
    square = {"rows": 70, "keys": 70}
    compare(MODS["alibi"][0], None, **square)
    compare(MODS["alibi"][0], MODS["documents"][1], **square)
    compare(lambda s, b, h, i, j: s + slopes[h] * (j - i), causal, **square)
    compare(lambda s, b, h, i, j: s + slopes[h] * (j - i), None, **square)
    compare(lambda s, b, h, i, j: s - slopes_of_batch[b, h] * (i - j).abs(), causal, **square)
    compare(lambda s, b, h, i, j: 2 * torch.tanh(s / 2) - slopes[h] * (i - j).abs(), causal, **square)
    compare(capped(0.75), causal)
    compare(lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / HEADS)), causal, **square)
    compare(lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / HEADS)), None, **square)
    with_gradient = slopes.clone().requires_grad_()
    compare(lambda s, b, h, i, j: s - with_gradient[h] * (i - j).abs(), causal, [with_gradient], **square)


def test_a_captured_soft_cap_is_a_literal():
    def recorded(multiplied, divided):
        return program.record(lambda s, b, h, i, j: multiplied * torch.tanh(s / divided)).text

    assert "div score 30.0" in recorded(30, 30.0)
    assert "div score s0" in recorded(30, 20)


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_groups_and_values_of_another_width(heads_kv):
    compare(*MODS["heads differ"], heads_kv=heads_kv, dim_v=16)
    compare(*MODS["documents"], heads_kv=heads_kv, scale=0.3)


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 70), (65, 64), (17, 3)])
def test_sizes(rows, keys):
    compare(MODS["alibi"][0], lambda b, h, i, j: i + 60 >= j, rows=rows, keys=keys)


def test_gradients_of_captured_tensors():
    bias = torch.randn(ROWS + KEYS - 1, requires_grad=True)
    table = torch.randn(HEADS, ROWS, KEYS, requires_grad=True)
    factor = torch.tensor(0.7, requires_grad=True)
    weight = torch.randn(HEADS, requires_grad=True)
    compare(lambda s, b, h, i, j: s + bias[i - j + KEYS - 1], causal, [bias])
    compare(lambda s, b, h, i, j: s * factor + table[h, i, j], None, [factor, table])
    compare(lambda s, b, h, i, j: torch.sigmoid(s * weight[h]) + s * weight[h] ** 2, causal, [weight], heads_kv=2)


def test_gradient_of_what_a_captured_tensor_comes_from():
    parameter = torch.randn(HEADS, requires_grad=True)
    q, k, v = tensors()
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + torch.exp(parameter)[h] * (i - j))
    (got,) = torch.autograd.grad(out.sum() * 1e-2, [parameter])
    exact = [tensor.detach().double() for tensor in (q, k, v)]
    expected, _ = dense(*exact, lambda s, b, h, i, j: s + torch.exp(parameter)[h] * (i - j), None)
    (wanted,) = torch.autograd.grad(expected.sum() * 1e-2, [parameter])
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)


def test_captured_gradients_are_the_same_in_every_run():
    q, k, v = tensors()
    weight = torch.randn(3, requires_grad=True)
    runs = []
    for _ in range(4):
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + weight[(i * j) % 3] * s)
        runs.append(torch.autograd.grad(out.square().sum(), [weight])[0])
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def test_finite_differences():
    """Of the loss by one element of a captured tensor; the loss in float64 is the reference's, the slope ours."""
    q, k, v = tensors(rows=20, keys=24)
    bias = torch.randn(8, requires_grad=True)

    def score_mod(s, b, h, i, j):
        return torch.tanh(s + bias[(i + 2 * j) % 8]) * 3

    (slope,) = torch.autograd.grad(flex_attention(q, k, v, score_mod).square().sum(), [bias])
    exact = [tensor.detach().double() for tensor in (q, k, v)]
    for n in range(8):
        step = torch.zeros(8, dtype=torch.float64)
        step[n] = 1e-5
        losses = []
        for sign in (1, -1):
            moved = bias.detach().double() + sign * step
            out, _ = dense(*exact, lambda s, b, h, i, j, at=moved: torch.tanh(s + at[(i + 2 * j) % 8]) * 3, None)
            losses.append(out.square().sum().item())
        assert slope[n].item() == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(dtype):
    q, k, v = tensors(dtype=dtype)
    slopes_16 = slopes.to(dtype)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes_16[h] * (i - j).abs())
    exact = [tensor.detach().double() for tensor in (q, k, v)]
    expected, _ = dense(*exact, MODS["alibi"][0], None)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max().item() < (4e-3 if dtype == torch.float16 else 3e-2)


@pytest.mark.parametrize("how", ["mask", "score"])
def test_nan_behind_a_mask(how):
    q, k, v = tensors()
    with torch.no_grad():
        for tensor, value in ((k, math.nan), (v, math.nan), (v, math.inf)):
            tensor[:, :, 60:64] = value
    shown = lambda b, h, i, j: (j < 60) | (j >= 64)  # noqa: E731
    if how == "mask":
        out = flex_attention(q, k, v, None, create_block_mask(shown, None, None, ROWS, KEYS))
    else:
        out = flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(shown(b, h, i, j), s, -math.inf))
    gradients = torch.autograd.grad(out.sum(), [q, k, v])
    assert all(tensor.isfinite().all() for tensor in (out, *gradients))
    kept = [j for j in range(KEYS) if not 60 <= j < 64]
    expected, _ = dense(q.detach().double(), k.detach().double()[:, :, kept], v.detach().double()[:, :, kept], None, None)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_captured_numbers_are_arguments():
    """Another number, another size: the same text, so nothing is compiled again."""
    from flash_attention.flex.program import record

    def window(width, table):
        return record(lambda s, b, h, i, j: s * 0.5 + table[h], lambda b, h, i, j: (i - j) <= width)

    one, other = window(17, torch.zeros(3)), window(400, torch.zeros(9))
    assert one.text == other.text
    assert one.numbers == [17] and other.numbers == [400]
    assert "0.5" in one.text  # what the source says stays


def test_a_function_is_recorded_once():
    """For the same code and the same kind of surroundings; what it captures may be another tensor."""
    from flash_attention.flex.program import record

    one, two = torch.zeros(3), torch.ones(3)

    def quiet(table, factor):
        return record(lambda s, b, h, i, j: s * factor + table[h])

    first, again, other = quiet(one, 2.5), quiet(two, 2.5), quiet(one, 3.5)
    assert again.text is first.text and again.tensors[0] is two and first.tensors[0] is one
    assert other.numbers == [3.5] and other.text == first.text
    changing = torch.zeros(2)
    derived = [record(lambda s, b, h, i, j: s + torch.exp(changing)[h]) for _ in range(2)]
    assert derived[0].tensors[0] is not derived[1].tensors[0]  # computed anew


def test_block_masks_of_torch():
    torch_flex = pytest.importorskip("torch.nn.attention.flex_attention")
    made = torch_flex.create_block_mask(MODS["documents"][1], BATCH, None, ROWS, KEYS, device="cpu", BLOCK_SIZE=32)
    q, k, v = tensors()
    out = flex_attention(q, k, v, block_mask=made)
    expected, _ = dense(*(tensor.detach().double() for tensor in (q, k, v)), *MODS["documents"])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    counts, lists = torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 0, 0], [2, 0, 0]]]], dtype=torch.int32)
    blocks = torch_flex.BlockMask.from_kv_blocks(counts.int(), lists, BLOCK_SIZE=48)
    out = flex_attention(q, k, v, block_mask=blocks)
    shown = {0: [1], 1: [2, 0]}
    expected, _ = dense(
        *(tensor.detach().double() for tensor in (q, k, v)),
        None,
        lambda b, h, i, j: sum(((i // 48 == r) & (j // 48 == c)).long() for r, cs in shown.items() for c in cs) > 0,
    )
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_dense_picture_of_a_mask():
    mask = create_block_mask(causal, None, None, 5, 7)
    assert torch.equal(mask.to_dense()[0, 0], torch.ones(5, 7).tril().bool())


def test_compile_around_it():
    def layer(q, k, v):
        return flash_attention.flex_attention(q * 2, k, v, MODS["alibi"][0]).sin()

    q, k, v = (tensor.detach() for tensor in tensors())
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))


def test_with_options_of_attention():
    """Packed sequences, window, softcap, bias, sink and dropout with a program."""
    q, k, v = (tensor.detach().transpose(1, 2).contiguous() for tensor in tensors(rows=KEYS))
    bias, sink = torch.randn(1, HEADS, 1, KEYS), torch.randn(HEADS)
    options = {"causal": True, "softcap": 3.0, "bias": bias, "sink": sink, "window": (40, 0)}
    mods = {"score_mod": lambda s, b, h, i, j: s * 0.5 + slopes[h], "mask_mod": lambda b, h, i, j: j % 5 != 1}
    out = flash_attention.attention(q, k, v, **options, **mods)
    exact = [tensor.double().transpose(1, 2) for tensor in (q, k, v)]

    def score_mod(s, b, h, i, j):
        return (3 * torch.tanh(s / 3) + bias[0, h, 0, j]) * 0.5 + slopes[h]

    def mask_mod(b, h, i, j):
        return (i >= j) & (i - j <= 40) & (j % 5 != 1)

    expected, lse = dense(*exact, score_mod, mask_mod)
    share = torch.sigmoid(lse - sink[None, :, None].double())[..., None]
    torch.testing.assert_close(out.transpose(1, 2).double(), expected * share, rtol=0, atol=2e-5)

    dropped = flash_attention.attention(q, k, v, dropout_p=0.3, seed=7, **mods)
    keep = torch.from_numpy(flash_attention.dropout_mask((BATCH, HEADS, KEYS, KEYS), 0.3, 7)) / 0.7
    scores = exact[0] @ exact[1].transpose(-1, -2) / math.sqrt(DIM)
    scores = over_all(mods["score_mod"], scores)(scores.shape)
    scores = torch.where(over_all(mods["mask_mod"])(scores.shape), scores, -math.inf)
    expected = (torch.softmax(scores, -1) * keep) @ exact[2]
    torch.testing.assert_close(dropped.transpose(1, 2).double(), expected, rtol=0, atol=2e-5)

    starts = torch.tensor([0, 50, 50, 134], dtype=torch.int32)
    packed = flash_attention.attention_packed(q[0], k[0], v[0], starts, causal=True, **mods)
    for begin, end in ((0, 50), (50, 134)):
        one = flash_attention.attention(*(tensor[:1, begin:end] for tensor in (q, k, v)), causal=True, **mods)
        torch.testing.assert_close(packed[begin:end], one[0])


@pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.long_tail)])
def test_models_of_transformers(stance):
    """attn_implementation="flex_attention", with the BlockMask that transformers makes, by default compiled."""
    transformers = pytest.importorskip("transformers")
    functions = transformers.AttentionInterface()
    original = functions["flex_attention"]
    flash_attention.register_transformers(flex=True)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens, padding = torch.arange(300).view(2, 150) % 64, torch.ones(2, 150, dtype=torch.long)
    padding[1, :20] = 0
    found = []
    try:
        for implementation in ("eager", "flex_attention"):
            torch.manual_seed(0)
            config = transformers.LlamaConfig(**sizes, **heads, attn_implementation=implementation)
            model = transformers.LlamaForCausalLM(config)
            with torch.compiler.set_stance(stance):
                logits = model(tokens, attention_mask=padding).logits[padding.bool()]
            logits.square().sum().backward()
            found.append((logits, model.model.layers[0].self_attn.q_proj.weight.grad))
    finally:
        transformers.AttentionInterface.register("flex_attention", original)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score_mod", [None, lambda s, b, h, i, j: s + b * 0.1 + slopes[h]], ids=["plain", "mod"])
def test_keys_that_the_batch_shares_and_any_strides(score_mod):
    """As torch takes them: keys of batch 1, and tensors whose last axis is not the innermost."""
    q = tensors()[0].detach().mT.contiguous().mT.requires_grad_()
    k, v = (tensor.detach()[:1].requires_grad_() for tensor in tensors()[1:])
    out = flex_attention(q, k, v, score_mod)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected, _ = dense(exact[0], *(tensor.expand(BATCH, -1, -1, -1) for tensor in exact[1:]), score_mod, None)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    got, wanted = torch.autograd.grad(out, [q, k, v], dout), torch.autograd.grad(expected, exact, dout.double())
    for one, other in zip((out, *got), (expected, *wanted), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def test_vectors_whose_axis_is_kept_and_that_are_detached():
    """Sums with keepdim, and a vector without a derivative beside the same with one."""
    points = torch.randn(KEYS, 3, generator=torch.Generator().manual_seed(4)).requires_grad_()

    def by_shares(score, b, h, i, j):
        apart = (points[i] - points[j]).abs()
        share = apart / (apart.sum(-1, keepdim=True) + 1.0)
        held = points[j].detach()
        return score - (share * held).sum() - apart.amax(-1, keepdim=True)[0]

    compare(by_shares, causal, [points])


@pytest.mark.parametrize("deterministic", [False, True])
def test_programs_under_autocast(deterministic):
    """The products are of 16 bits, gradients of the tensors' own type; deterministic algorithms are the same numbers twice."""
    table = torch.randn(HEADS, KEYS, generator=torch.Generator().manual_seed(5)).requires_grad_()
    q, k, v = tensors()
    mod = lambda s, b, h, i, j: s + table[h, j]  # noqa: E731
    torch.use_deterministic_algorithms(deterministic)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, again = (flex_attention(q, k, v, mod) for _ in range(2))
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        got, same = (torch.autograd.grad(one, [q, k, v, table], dout.to(one.dtype)) for one in (out, again))
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.dtype == torch.bfloat16 and all(one.dtype == torch.float32 for one in got)
    assert not deterministic or all(map(torch.equal, got, same))
    exact = [tensor.detach().bfloat16().double().requires_grad_() for tensor in (q, k, v)]
    expected, _ = dense(*exact, mod, None)
    wanted = torch.autograd.grad(expected, [*exact, table], dout.bfloat16().double())
    for one, other in zip((out, *got), (expected, *wanted), strict=True):
        assert (one.double() - other).abs().max() <= 0.02 * other.abs().max()
