"""prepare_qk and the norms, sections and scaled angles of append_kv, against torch in float64."""

import math

import pytest
import torch
from flash_attention import attention, prepare_qk, rotary_frequencies, rotary_tables
from flash_attention.append import append_kv

TYPES = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def normalised(x, weight, eps=1e-6, plus_one=False):
    """x [..., dim] in float64."""
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x if weight is True else x * (weight.double() + (1 if plus_one else 0))


def rotated(x, cos, sin, interleaved=False):
    """x [..., heads, dim]; cos and sin [..., pairs] of each row."""
    half = cos.shape[-1]
    c, s = cos.double()[..., None, :], sin.double()[..., None, :]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    return torch.cat((turned, rest), -1)


def close(got, want, dtype, scale=1.0):
    error = (got.double() - want).abs()
    assert (error <= TYPES[dtype] * (want.abs() + scale)).all(), error.max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(128, 128), (64, 24), (27, 10), (64, 0)])
def test_values_and_gradients(dtype, interleaved, dim, rotary_dim):
    torch.manual_seed(1)
    q, k = torch.randn(2, 7, 6, dim).to(dtype) * 3, torch.randn(2, 7, 2, dim).to(dtype)
    weights = [torch.randn(dim).to(dtype) for _ in range(2)]
    tables = rotary_tables(20, rotary_dim) if rotary_dim else (None, None)
    offsets = torch.tensor([3, 11], dtype=torch.int32) if rotary_dim else None
    inputs = [t.clone().requires_grad_() for t in (q, k, *weights)]
    got = prepare_qk(
        *inputs[:2], q_norm=inputs[2], k_norm=inputs[3], cos=tables[0], sin=tables[1], interleaved=interleaved,
        rotary_offsets=offsets, norm_plus_one=True, norm_eps=1e-3,
    )  # fmt: skip
    exact = [t.double().requires_grad_() for t in (q, k, *weights)]
    want = [normalised(x, w, 1e-3, True) for x, w in zip(exact[:2], exact[2:], strict=True)]
    if rotary_dim:
        places = offsets.long()[:, None] + torch.arange(7)
        want = [rotated(x, tables[0][places], tables[1][places], interleaved) for x in want]
    for x, y in zip(got, want, strict=True):
        assert x.dtype == dtype
        close(x, y, dtype)
    upstream = [torch.randn_like(x) for x in got]
    gradients = torch.autograd.grad(got, inputs, upstream)
    exact_gradients = torch.autograd.grad(want, exact, [g.double() for g in upstream])
    for i, (x, y) in enumerate(zip(gradients, exact_gradients, strict=True)):
        assert x.dtype == dtype
        close(x, y, dtype, scale=1.0 if i < 2 else 20 * TYPES[torch.float32] / TYPES[dtype] + 1)


def test_each_part_is_optional():
    torch.manual_seed(2)
    q, k, weight = torch.randn(1, 5, 4, 32), torch.randn(1, 5, 2, 32), torch.randn(32)
    same = prepare_qk(q, k)
    assert torch.equal(same[0], q) and torch.equal(same[1], k)
    got = prepare_qk(q, k, q_norm=True)
    close(got[0], normalised(q.double(), True), torch.float32)
    assert torch.equal(got[1], k)
    got = prepare_qk(q.requires_grad_(), k, k_norm=weight)  # only q wants a gradient, and has no norm
    close(got[1], normalised(k.double(), weight), torch.float32)
    assert torch.equal(torch.autograd.grad(got[0].sum() + got[1].sum(), q)[0], torch.ones_like(q))


def test_a_packed_batch_and_heads_first():
    torch.manual_seed(3)
    starts, lengths = torch.tensor([0, 4, 4, 9], dtype=torch.int32), [4, 0, 5]
    q, k = torch.randn(11, 4, 32), torch.randn(11, 2, 32)
    cos, sin = rotary_tables(16, 32)
    inputs = q.clone().requires_grad_(), k.clone().requires_grad_()
    got = prepare_qk(*inputs, q_norm=True, cos=cos, sin=sin, cu_seqlens=starts)
    places = torch.cat([torch.arange(n) for n in lengths])
    close(got[0][:9], rotated(normalised(q[:9].double(), True), cos[places], sin[places]), torch.float32)
    close(got[1][:9], rotated(k[:9].double(), cos[places], sin[places]), torch.float32)
    assert not got[0][9:].any() and not got[1][9:].any()  # rows that belong to no sequence
    gradients = torch.autograd.grad(got, inputs, [torch.ones_like(x) for x in got])
    assert not gradients[0][9:].any() and gradients[1][:9].any()
    dense = prepare_qk(q[None], k[None], q_norm=True, cos=cos, sin=sin)
    first = prepare_qk(q[None].transpose(1, 2), k[None].transpose(1, 2), q_norm=True, cos=cos, sin=sin, layout="bhsd")
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(dense, first, strict=True))


@pytest.mark.parametrize("sections_interleaved", [False, True])
def test_sections_of_a_multimodal_model(sections_interleaved):
    """As Qwen2-VL (chunks of pairs) and Qwen3-VL (every third pair) turn them."""
    torch.manual_seed(4)
    q, k, sections = torch.randn(2, 6, 4, 64), torch.randn(2, 6, 2, 64), [12, 10, 10]
    positions = torch.randint(0, 40, (3, 2, 6), dtype=torch.int32)
    cos, sin = rotary_tables(40, 64)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    if sections_interleaved:
        owner = torch.zeros(32, dtype=torch.long)
        owner[1:30:3], owner[2:30:3] = 1, 2
    places = positions.long()[owner]  # [pairs, batch, seq]
    pairs = torch.arange(32)[:, None, None]
    own_cos, own_sin = (table[places, pairs].permute(1, 2, 0) for table in (cos, sin))
    options = {"cos": cos, "sin": sin, "angle_positions": positions, "sections": sections}
    options["sections_interleaved"] = sections_interleaved
    inputs = q.clone().requires_grad_(), k.clone().requires_grad_()
    got = prepare_qk(*inputs, **options)
    exact = q.double().requires_grad_(), k.double().requires_grad_()
    want = [rotated(x, own_cos, own_sin) for x in exact]
    upstream = [torch.randn_like(x) for x in got]
    for x, y in zip(got, want, strict=True):
        close(x, y, torch.float32)
    exact_gradients = torch.autograd.grad(want, exact, [g.double() for g in upstream])
    for x, y in zip(torch.autograd.grad(got, inputs, upstream), exact_gradients, strict=True):
        close(x, y, torch.float32)
    table = torch.tensor([[2], [0]], dtype=torch.int32)
    caches = [torch.zeros(3, 8, 2, 64) for _ in range(2)]
    appended = append_kv(*caches, k, k, q=q, page_table=table, **options)
    assert torch.equal(appended, got[0]) and torch.equal(caches[0][[2, 0], :6], got[1])
    assert torch.equal(caches[1][[2, 0], :6], k) and not caches[0][1].any()


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
def test_everything_before_attention_in_one_call(code):
    torch.manual_seed(5)
    q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    weights = torch.rand(64) + 0.5, torch.rand(64) + 0.5
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    cos, sin = rotary_tables(512, 48, 1e6, scaling=scaling)
    lengths, table = torch.tensor([300, 17], dtype=torch.int32), torch.tensor([[4, 9, 1], [0, 2, 3]], dtype=torch.int32)
    caches = [torch.zeros(10, 128, 2, 64, dtype=code) for _ in range(2)]
    scales = [torch.zeros(10, 128, 2) for _ in range(2)]
    q_out = append_kv(
        *caches, k, v, q=q, lengths=lengths, page_table=table, cos=cos, sin=sin, q_norm=weights[0], k_norm=weights[1],
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    own = lengths.long()[:, None]
    close(q_out, rotated(normalised(q.double(), weights[0]), cos[own], sin[own]), torch.float32)
    want = rotated(normalised(k.double(), weights[1]), cos[own], sin[own])
    for b in range(2):
        page, row = int(table[b, lengths[b] // 128]), int(lengths[b]) % 128
        for cache, scale, x in ((caches[0], scales[0], want[b, 0]), (caches[1], scales[1], v.double()[b, 0])):
            error = (cache[page, row].double() * scale[page, row].double()[:, None] - x).abs()
            assert (error <= x.abs() * 2**-4 + x.abs().amax(-1, keepdim=True) / 100).all()


def test_what_is_rotated_goes_to_attention():
    torch.manual_seed(6)
    q, k, v = (torch.randn(1, 33, heads, 64, requires_grad=True) for heads in (4, 2, 2))
    cos, sin = rotary_tables(33, 64)
    out = attention(*prepare_qk(q, k, q_norm=True, k_norm=True, cos=cos, sin=sin), v, causal=True)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    turned = [rotated(normalised(x, True), cos, sin).transpose(1, 2) for x in exact[:2]]
    want = torch.nn.functional.scaled_dot_product_attention(
        *turned, exact[2].transpose(1, 2), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    for x, y in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)), torch.autograd.grad(want.square().sum(), exact), strict=True
    ):
        close(x, y, torch.float32, scale=40)


def test_compiled_and_exported():
    torch.manual_seed(7)
    q, k, weight = torch.randn(1, 5, 4, 32), torch.randn(1, 5, 2, 32), torch.randn(32, requires_grad=True)
    cos, sin = rotary_tables(8, 32)

    def call(q, k):
        return prepare_qk(q, k, q_norm=weight, cos=cos, sin=sin)[0].square().sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(q, k), weight)[0]
    assert torch.equal(torch.autograd.grad(compiled(q, k), weight)[0], expected)
    inputs = (q, k, None, None, cos, sin, None, None, None, False, True, False, False, 1e-6, [], False)
    torch.library.opcheck(torch.ops.flash_attention.prepare_qk.default, inputs)


def test_second_derivatives_are_refused():
    q = torch.randn(1, 3, 2, 16, requires_grad=True)
    (dq,) = torch.autograd.grad(prepare_qk(q, q, q_norm=True)[0].square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(dq.sum(), q)


def test_wrong_arguments():
    q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 3, 2, 16)
    cos, sin = rotary_tables(3, 16)
    refused = [
        ({"q_norm": torch.ones(8)}, "q_norm.*expected \\[16\\]"),
        ({"q_norm": torch.ones(16), "norm_eps": -1.0}, "norm_eps"),
        ({"norm_plus_one": True}, "norm_plus_one"),
        ({"cos": cos, "sin": sin, "sections": [4, 4]}, "angle_positions"),
        ({"cos": cos, "sin": sin, "angle_positions": torch.zeros(2, 3, dtype=torch.int32)}, "contiguous \\[1, 3\\]"),
        ({"cos": cos, "sin": sin, "angle_positions": torch.full((1, 3), 3, dtype=torch.int32)}, "angle_positions\\[0\\]"),
        (
            {"cos": cos, "sin": sin, "sections": [4, 5], "angle_positions": torch.zeros(2, 1, 3, dtype=torch.int32)},
            "rotary_sections",
        ),
        ({"angle_positions": torch.zeros(1, 3, dtype=torch.int32)}, "angle_sections|rotary_dim"),
        ({"cosines": cos}, "cosines"),
    ]
    for options, words in refused:
        with pytest.raises((ValueError, TypeError), match=words):
            prepare_qk(q, k, **options)
    with pytest.raises(ValueError, match="rope_type"):
        rotary_tables(4, 16, scaling={"rope_type": "longer"})
    with pytest.raises(ValueError, match="factor"):
        rotary_tables(4, 16, scaling={"rope_type": "linear"})


SCALINGS = (
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    | {"mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}
    | {"beta_slow": 1.0, "truncate": False},
    {"rope_type": "linear", "factor": 2.0},
)


@pytest.mark.parametrize("scaling", SCALINGS, ids=[f"{i}_{s['rope_type']}" for i, s in enumerate(SCALINGS)])
def test_frequencies_are_those_of_transformers(scaling):
    """Their functions compute in float32; ours must be within its rounding."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**scaling, "rope_theta": 150000.0}
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=131072, rope_theta=150000.0
    )
    config.rope_scaling = parameters
    config.rope_parameters = parameters
    want, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    got, factor = rotary_frequencies(128, 150000.0, scaling=scaling, max_positions=131072)
    assert torch.allclose(got, want.double(), rtol=2e-6, atol=0)
    assert math.isclose(factor, magnitude, rel_tol=1e-6)
    cos, _ = rotary_tables(3, 128, 150000.0, scaling=scaling, max_positions=131072, dtype=torch.float64)
    assert torch.equal(cos[2], factor * (2 * got).cos())


@pytest.mark.gpu
def test_one_launch_on_a_gpu():
    torch.manual_seed(8)
    q, k, v = (torch.randn(1, 64, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    weights = [torch.rand(128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    cos, sin = rotary_tables(64, 128, device="cuda")
    caches = [torch.zeros(4, 16, 2, 128, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.zeros(4, 16, 2, device="cuda") for _ in range(2)]
    table = torch.arange(4, device="cuda", dtype=torch.int32)[None]
    q_out = torch.empty_like(q)
    inputs = [t.clone().requires_grad_() for t in (q, k, *weights)]
    calls = (
        lambda: append_kv(
            *caches, k, v, q=q, page_table=table, cos=cos, sin=sin, q_norm=weights[0], k_norm=weights[1], q_out=q_out,
            k_scale=scales[0], v_scale=scales[1],
        ),
        lambda: prepare_qk(*inputs[:2], q_norm=inputs[2], k_norm=inputs[3], cos=cos, sin=sin),
    )  # fmt: skip
    for call in calls:
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        launches = [event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
        assert len(launches) == 1, [event.name for event in launches]
    got = calls[1]()
    want = [rotated(normalised(x.double(), w), cos, sin) for x, w in zip((q, k), weights, strict=True)]
    for x, y in zip(got, want, strict=True):
        close(x, y, torch.bfloat16)
    assert torch.equal(got[0], q_out)
    upstream = [torch.randn_like(x) for x in got]
    gradients = torch.autograd.grad(got, inputs, upstream)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    values = [rotated(normalised(x, w), cos, sin) for x, w in zip(exact[:2], exact[2:], strict=True)]
    for x, y in zip(gradients, torch.autograd.grad(values, exact, [g.double() for g in upstream]), strict=True):
        close(x, y, torch.bfloat16)
