"""Every entry computes attention: against fp64, on this machine."""

import sys

import pytest

torch = pytest.importorskip("torch")
baselines = pytest.importorskip("peers.baselines")
from benchmark_accuracy import exact  # noqa: E402
from cases import Case  # noqa: E402
from peers import megatron_attention as megatron  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASE = Case(2, 48, 4, 32, heads_kv=2, causal=True, dtype="float32")


def test_the_exact_gradients_are_those_of_autograd():
    q, k, v, grad = (torch.randn(1, 12, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2, 4))
    keys, values = (t.repeat_interleave(2, 2).transpose(1, 2) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True).transpose(1, 2)
    want = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    for a, b in zip(exact(q, k, v, grad, True), want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("entry", baselines.FIXED, ids=lambda e: e.name)
def test_entry_computes_attention(entry, causal):
    case = Case(2, 64, 4, 64, heads_kv=2, causal=causal, dtype="float32" if DEVICE == "cpu" else "bfloat16")
    reason = entry.reject(case, DEVICE)
    if reason:
        pytest.skip(reason)
    q, k, v, grad = baselines.inputs(case, entry, DEVICE, needs_grad=True)
    try:
        out = entry.run(q, k, v, case)
    except NotImplementedError as error:
        pytest.skip(str(error))
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    tolerance = 1e-4 if case.dtype == "float32" else 3e-2
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, exact(q, k, v, grad, causal), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


OPTIONS = {
    "softcap": {"softcap": 2.0, "causal": True},
    "ALiBi": {"alibi": True},
    "ALiBi causal": {"alibi": True, "causal": True},
    "fixed bias": {"bias": "fixed"},
    "learned bias": {"bias": "learned"},
    "learned bias causal": {"bias": "learned", "causal": True},
    "window": {"window": 7, "causal": True},
    "window both": {"window": 7},
    "random mask": {"masked": "random"},
    "documents": {"masked": "documents"},
    "few queries": {"queries": 9},
    "few queries causal": {"queries": 9, "causal": True},
    "narrow values": {"head_dim_v": 16},
}


def dense(q, k, v, case, bias):
    """By the formula, in float64; the bias is the case's own."""
    i, j = torch.arange(q.shape[1])[:, None] + case.seq - q.shape[1], torch.arange(case.seq)[None]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * case.head_dim**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.alibi:
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / case.heads) for h in range(case.heads)], dtype=torch.float64)
        scores = scores - slopes[:, None, None] * (i - j).abs()
    if bias is not None:
        scores = scores + bias
    seen = (j <= i) if case.causal else torch.ones_like(i + j, dtype=torch.bool)
    if case.window:
        seen = seen & (j >= i - case.window) & (j <= i + case.window)
    if case.masked:
        seen = seen & baselines.operands.boolean_mask(case, "cpu")[0, 0]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["ours", "standard", "sdpa", "sdpa_math", "flex"])
def test_an_option_means_the_same_to_everyone(option, name, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    case, entry = Case(1, 40, 2, 32, dtype="float32", **OPTIONS[option]), baselines.all_baselines()[name]
    reason = entry.reject(case, "cuda" if name == "flex" else "cpu")
    if reason:
        assert (name, option) in {("sdpa", "softcap"), ("sdpa_math", "softcap")}, reason
        return
    monkeypatch.setattr(baselines.flex_attention, "compiled", lambda: flex_attention)
    q, k, v, grad = baselines.inputs(case, entry, "cpu", needs_grad=True)
    wanted = baselines.wanted(case, q, k, v)
    assert len(wanted) == (4 if case.bias == "learned" else 3)
    exact = [tensor.detach().double().requires_grad_() for tensor in wanted]
    bias = exact[3:][0] if exact[3:] else baselines.operands.bias(case, "cpu").double() if case.bias else None
    want = dense(*exact[:3], case, bias)
    differentiable = name != "flex"  # which has no backward pass on CPUs
    with torch.set_grad_enabled(differentiable):
        out = entry.run(*(tensor if differentiable else tensor.detach() for tensor in (q, k, v)), case)
    torch.testing.assert_close(out.detach().double(), want.detach(), rtol=1e-4, atol=1e-5)
    if differentiable:
        for a, b in zip(
            torch.autograd.grad(out, wanted, grad), torch.autograd.grad(want, exact, grad.double()), strict=True
        ):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-5)


def test_tensors_of_8_bits():
    case, entry = Case(1, 64, 2, 32, causal=True), baselines.all_baselines()["ours_fp8"]
    if entry.reject(case, DEVICE):
        pytest.skip(entry.reject(case, DEVICE))
    q, k, v, _ = baselines.inputs(case, entry, DEVICE, needs_grad=False)
    assert q.dtype == k.dtype == v.dtype == torch.float8_e4m3fn
    out = entry.run(q, k, v, case)
    want = dense(*(tensor.double().cpu() for tensor in (q, k, v)), case, None)
    assert out.dtype == torch.bfloat16 and (out.double().cpu() - want).abs().max() < 0.1
    assert entry.lacks("backward") == "no backward pass"
    assert "full or causal" in entry.reject(Case(1, 64, 2, 32, softcap=1.0), DEVICE)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 7}, {"softcap": 2.0}], ids=str)
def test_flash_attention_3_is_called_by_its_signature(options, monkeypatch):
    """Our module of the same signature takes its place."""
    stand_in = pytest.importorskip("flash_attention.flash_attn_3", reason="flash_attention is not built")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in)
    case, entries = Case(2, 40, 4, 32, heads_kv=2, dtype="float32", **options), baselines.all_baselines()
    q, k, v, _ = baselines.inputs(case, entries["ours"], "cpu", needs_grad=False)
    found, wanted = (entries[name].run(q, k, v, case) for name in ("flash_attn_3", "ours"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_fused_softmax_is_the_separate_one():
    pytest.importorskip("triton", reason="Triton is not installed")
    from peers.megatron_softmax import fused_softmax

    for causal in (False, True):
        scores = torch.randn(3, 20, 20, device=DEVICE).half().requires_grad_()
        grad = torch.randn(3, 20, 20, device=DEVICE).half()
        found, wanted = fused_softmax(scores, causal), megatron.separate_softmax(scores, causal)
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-4)
        a, b = (torch.autograd.grad(w, scores, grad)[0] for w in (found, wanted))
        torch.testing.assert_close(a, b, rtol=2e-3, atol=5e-4)


def test_a_row_hidden_entirely_is_uniform_as_in_megatron():
    scores = torch.zeros(1, 2, 4).masked_fill(torch.ones(2, 4, dtype=torch.bool), megatron.HIDDEN)
    torch.testing.assert_close(megatron.separate_softmax(scores, False), torch.full((1, 2, 4), 0.25))


def test_dropout_scales_what_it_keeps():
    torch.manual_seed(0)
    case = Case(1, 128, 2, 8, dtype="float32", dropout_p=0.5)
    q, k = torch.zeros(1, 128, 2, 8), torch.zeros(1, 128, 2, 8)
    out = megatron.local(q, k, torch.ones(1, 128, 2, 8), case)
    assert out.std() > 0.05 and abs(out.mean().item() - 1.0) < 0.05


def test_rejections_say_why():
    entries = baselines.all_baselines()
    assert entries["sdpa_cudnn"].reject(CASE, "cpu") == "runs on cuda only"
    assert entries["sdpa_cudnn"].reject(CASE, "cuda") == "float32 is not supported"
    assert entries["sdpa_flash"].reject(Case(1, 8, 1, 8, window=3), "cuda") == "no sliding window"
    assert entries["flex"].reject(Case(1, 8, 1, 8, dropout_p=0.1), "cuda") == "no dropout"
    assert entries["flash_attn_3"].reject(CASE, "cuda") in (
        "flash_attn_interface is not installed",
        "float32 is not supported",
    )


def test_unknown_baseline_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"baseline: got 'fa9'; allowed: sdpa_math, sdpa_efficient, .*, ours.*, ladder"):
        baselines.select(["ours", "fa9"])


def test_ours_takes_a_packed_case_as_it_is_and_standard_a_padded_one():
    case = Case(2, 40, 2, 32, causal=True, dtype="float32", lengths=(13, 40))
    entries = baselines.all_baselines()
    ours, standard = entries["ours"], entries["standard"]
    if ours.reject(case, DEVICE):
        pytest.skip(ours.reject(case, DEVICE))
    q, k, v, _ = baselines.inputs(case, ours, DEVICE, needs_grad=False)
    out = ours.run(q, k, v, case)
    for part in (slice(0, 13), slice(13, 53)):
        q_part, k_part, v_part = (t[part].unsqueeze(0) for t in (q, k, v))
        want = exact(q_part, k_part, v_part, torch.zeros_like(q_part), True)[0]
        torch.testing.assert_close(out[part].double(), want[0], rtol=1e-4, atol=1e-4)
    assert standard.run(*baselines.inputs(case, standard, DEVICE, needs_grad=False)[:3], case).shape == (2, 40, 2, 32)


def test_packed_inputs_only_where_the_entry_packs():
    case = Case(2, 30, 2, 16, dtype="float32", lengths=(10, 30))
    entries = baselines.all_baselines()
    assert baselines.inputs(case, entries["ours"], "cpu", False)[0].shape == (40, 2, 16)
    assert baselines.inputs(case, entries["sdpa_math"], "cpu", False)[0].shape == (2, 30, 2, 16)
    assert baselines.operands.bounds(case, "cpu").tolist() == [0, 10, 40]
