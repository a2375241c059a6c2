"""The Triton kernels against fp64 attention: on the GPU where there is one, else in Triton's interpreter."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed")
triton_attention = pytest.importorskip("flash_attention.triton", exc_type=ImportError).attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]  # what is masked may overflow in the interpreter
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)


def exact(q, k, v, causal, scale):
    """fp64 (out, lse), written with loops over nothing but heads; [batch, seq, heads, head_dim]."""
    q, k, v = (t.detach().cpu().double() for t in (q, k, v))
    batch, seq_q, heads, _ = q.shape
    seq_kv, group = k.shape[1], heads // k.shape[2]
    out = torch.zeros(batch, seq_q, heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, seq_q), float("-inf"), dtype=torch.float64)
    for head in range(heads):
        scores = torch.einsum("bid,bjd->bij", q[:, :, head], k[:, :, head // group]) * scale
        for i in range(seq_q):
            seen = max(0, min(seq_kv, i + seq_kv - seq_q + 1)) if causal else seq_kv
            if seen == 0:
                continue
            row = scores[:, i, :seen]
            lse[:, head, i] = torch.logsumexp(row, -1)
            out[:, i, head] = torch.einsum("bj,bjd->bd", torch.softmax(row, -1), v[:, :seen, head // group])
    return out, lse


def exact_grads(q, k, v, grad_out, grad_lse, causal, scale):
    """fp64 gradients by the formulas of the paper, from explicit P."""
    q, k, v, grad_out = (t.detach().cpu().double().transpose(1, 2) for t in (q, k, v, grad_out))
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ keys.mT * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    weights = torch.nan_to_num(torch.softmax(scores.masked_fill(~seen, float("-inf")), -1))
    grad_weights = grad_out @ values.mT
    row = (weights * grad_weights).sum(-1, keepdim=True) - grad_lse.cpu().double()[..., None]
    grad_scores = weights * (grad_weights - row)
    fold = lambda t: t.reshape(t.shape[0], k.shape[1], group, *t.shape[2:]).sum(2)  # noqa: E731
    grads = grad_scores @ keys * scale, fold(grad_scores.mT @ q) * scale, fold(weights.mT @ grad_out)
    return [g.transpose(1, 2) for g in grads]


def make(batch, seq, heads, head_dim, dtype):
    return torch.randn(batch, seq, heads, head_dim, device=DEVICE).to(dtype)


def assert_near(got, want, dtype, name):
    # Twice the rounding of the output, and that of P and dS, which the kernels round to the inputs' type.
    unit = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    got = got.detach().cpu().double()
    assert torch.equal(torch.isfinite(got), torch.isfinite(want)), f"{name}: infinities in other places"
    finite = torch.isfinite(want)
    error = (got - want)[finite].abs().max().item() if finite.any() else 0.0
    size = max(want[finite].abs().max().item(), 1.0) if finite.any() else 1.0
    assert error <= 2 * unit * size, f"{name}: error {error:.2e} where the largest value is {size:.2e}"


CASES = [  # batch, seq_q, seq_kv, heads_q, heads_kv, head_dim
    (1, 64, 64, 2, 2, 64),
    (2, 37, 37, 2, 1, 32),
    (1, 33, 70, 4, 2, 40),
    (1, 50, 19, 2, 2, 16),  # causal: the first 31 queries see no key
    (1, 1, 45, 3, 1, 128),
    (1, 45, 1, 2, 2, 8),
    (1, 20, 130, 1, 1, 256),
    (1, 40, 256, 2, 1, 24),
]


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.long_tail)],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "x".join(map(str, c)))
def test_forward_and_backward(case, causal, dtype):
    batch, seq_q, seq_kv, heads_q, heads_kv, head_dim = case
    torch.manual_seed(1)
    q = make(batch, seq_q, heads_q, head_dim, dtype).requires_grad_()
    k = make(batch, seq_kv, heads_kv, head_dim, dtype).requires_grad_()
    v = make(batch, seq_kv, heads_kv, head_dim, dtype).requires_grad_()
    scale = 0.7 * head_dim**-0.5
    out, lse = triton_attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    grad_out = make(batch, seq_q, heads_q, head_dim, dtype)
    grad_lse = torch.randn(lse.shape, device=DEVICE)
    grad_lse = torch.where(torch.isfinite(lse), grad_lse, 0.0)
    grads = torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse))

    want_out, want_lse = exact(q, k, v, causal, scale)
    assert_near(out, want_out, dtype, "out")
    assert lse.dtype == torch.float32 and lse.shape == (batch, heads_q, seq_q)
    assert_near(lse, want_lse, torch.float16, "lse")
    for name, got, want in zip(
        ("dq", "dk", "dv"), grads, exact_grads(q, k, v, grad_out, grad_lse, causal, scale), strict=True
    ):
        assert_near(got, want, dtype, name)


def test_takes_any_strides():
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 2, 40, 3, 32, device=DEVICE).half().permute(1, 0, 2, 3, 4)[1] for _ in range(3))
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert heads_first[0].stride() != q.stride()
    torch.testing.assert_close(triton_attention(q, k, v), triton_attention(*heads_first), rtol=0, atol=0)


def test_nan_and_inf_beyond_the_end_stay_out():
    torch.manual_seed(3)
    whole = [make(1, 64, 2, 32, torch.float16) for _ in range(3)]
    for tensor in whole:
        tensor[:, 40:] = float("nan")
    used = [t[:, :40] for t in whole]  # the NaN are the next rows in memory
    out = triton_attention(*used, causal=True)
    torch.testing.assert_close(out, triton_attention(*(t.contiguous() for t in used), causal=True), rtol=0, atol=0)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_and_inf_reach_only_queries_that_see_them(which):
    """A bad key among those of one tile: outputs and gradients of earlier queries stay as they were."""
    torch.manual_seed(5)
    bad, seq = 40, 80
    inputs = [make(1, seq, 1, 32, torch.float16).requires_grad_() for _ in range(3)]
    grad_out = make(1, seq, 1, 32, torch.float16)
    clean = triton_attention(*inputs, causal=True)
    clean_dq = torch.autograd.grad(clean[:, :bad], inputs[0], grad_out[:, :bad])[0]
    spoiled = [t.detach().clone() for t in inputs]
    spoiled["qkv".index(which)][:, bad, :, 3:5] = torch.tensor([float("nan"), float("inf")], device=DEVICE).half()
    spoiled = [t.requires_grad_() for t in spoiled]
    out = triton_attention(*spoiled, causal=True)
    assert_near(out[:, :bad], clean[:, :bad].detach().cpu().double(), torch.float16, "out")
    assert out[:, bad:].isnan().any(dim=-1).all()
    dq = torch.autograd.grad(out, spoiled[0], grad_out)[0]
    assert_near(dq[:, :bad], clean_dq[:, :bad].detach().cpu().double(), torch.float16, "dq")
    assert dq[:, bad:].isnan().any(dim=-1).all()


@pytest.mark.parametrize("seq_q, seq_kv", [(0, 16), (16, 0)])
def test_empty_lengths(seq_q, seq_kv):
    q = make(1, seq_q, 2, 16, torch.float16).requires_grad_()
    k, v = (make(1, seq_kv, 2, 16, torch.float16).requires_grad_() for _ in range(2))
    out, lse = triton_attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and not out.any() and (lse == float("-inf")).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not grad.any()


def test_logits_shifted_far():
    torch.manual_seed(4)
    q, k, v = (make(1, 48, 1, 64, torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 30.0, 32.0  # adds 120 to every logit
    out, lse = triton_attention(q, k, v, return_lse=True)
    want_out, want_lse = exact(q, k, v, False, 0.125)
    assert_near(out, want_out, torch.bfloat16, "out")
    assert_near(lse, want_lse, torch.float16, "lse")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": (1, 8, 3, 32)}, "heads_kv: got 2; allowed: a divisor of heads_q, 3"),
        ({"q": (1, 8, 2, 20)}, "head_dim: got 20; allowed: a multiple of 8 from 8 to 256"),
        ({"q": (8, 2, 32)}, "q: got 3 dimensions"),
        ({"k": (2, 8, 2, 32)}, "k: got shape"),
        ({"v": (1, 9, 2, 32)}, "v: got shape"),
        ({"scale": 0.0}, "scale: got 0.0; allowed: a number above 0"),
        ({"dtype": "float32"}, "got dtype torch.float32; allowed: torch.float16, torch.bfloat16"),
    ],
)
def test_refusals_name_argument_value_and_allowed(change, message):
    shapes = {"q": (1, 8, 2, 32), "k": (1, 8, 2, 32), "v": (1, 8, 2, 32)} | {n: s for n, s in change.items() if n in "qkv"}
    tensors = [torch.zeros(s, dtype=getattr(torch, change.get("dtype", "float16")), device=DEVICE) for s in shapes.values()]
    with pytest.raises(ValueError, match=re.escape(message)):
        triton_attention(*tensors, scale=change.get("scale"))


def test_module_prints_passed(warm_python):
    done = warm_python("-m", "flash_attention.triton")
    assert done.returncode == 0 and done.stdout.rstrip().endswith("PASSED"), done.stdout + done.stderr


@pytest.mark.parametrize("dims", [(64,), pytest.param((64, 256), marks=pytest.mark.long_tail)], ids=str)
def test_compiles_for_amd_gfx942(dims, warm_python):
    done = warm_python("-m", "flash_attention.triton.compile_only", "hip:gfx942", "--smallest", *map(str, dims))
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"gfx942 (\w+) d(\d+) .*shared (\d+) code (\d+)", done.stdout)
    assert len(rows) == 7 * len(dims), done.stdout  # (forward, dq, dkv) x (full, causal) + preprocess
    for _, _, shared, code in rows:
        assert int(shared) <= 64 * 1024 and int(code) > 1000


def test_compile_refuses_unknown_target(warm_python):
    done = warm_python("-m", "flash_attention.triton.compile_only", "hip:gfx0")
    assert done.returncode != 0 and "got 'hip:gfx0'; allowed: cuda:80, cuda:90, hip:gfx942" in done.stderr
