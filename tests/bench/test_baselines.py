"""Every entry computes attention: against fp64, on this machine."""

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
    assert baselines.bounds(case, "cpu").tolist() == [0, 10, 40]
