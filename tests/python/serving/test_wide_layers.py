"""A pair of layers as Gemma 4 has them, 256 columns in a window and 512 over everything, 8 query heads to 4 key heads:
trained on packed sequences, then decoded from pages, on tensor cores."""

import itertools

import pytest
import reference
import torch
from flash_attention import attention_packed, explain
from flash_attention.torch_cache import attention_over_cache

LAYERS = [pytest.param(256, (200, 0), id="256 in a window"), pytest.param(512, (-1, -1), id="512")]
HEADS, KV_HEADS, LENGTHS, PAGE = 8, 4, [389, 0, 64, 131], 64


def assert_close(got, exact, plain, name):
    """At most twice the error of plain attention in the same type, as in docs/numerics.md."""
    error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (got, plain))
    assert error <= 2 * allowed + 1e-3, f"{name}: error {error:.2e}, plain attention {allowed:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dim, window", LAYERS)
def test_trains_packed(dim, window):
    generator = torch.Generator("cuda").manual_seed(dim)
    bounds = [0, *itertools.accumulate(LENGTHS)]
    draw = lambda heads: torch.randn(  # noqa: E731
        bounds[-1], heads, dim, device="cuda", dtype=torch.bfloat16, generator=generator
    )
    tensors, dout = [draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)], draw(HEADS)
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")

    def step(attend, kind):
        leaves = [tensor.to(kind).requires_grad_() for tensor in tensors]
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(kind))]

    ours = lambda q, k, v: attention_packed(q, k, v, cu, causal=True, window=window)  # noqa: E731
    plain = lambda q, k, v: reference.attention_packed(q, k, v, bounds, bounds, causal=True, window=window)[0]  # noqa: E731
    got = step(ours, torch.bfloat16)
    expected, rounded = step(plain, torch.float64), step(plain, torch.bfloat16)
    for name, *three in zip(("out", "dq", "dk", "dv"), got, expected, rounded, strict=True):
        assert_close(*three, name)
    for backward, kernel in ((False, "forward/sm90"), (True, "backward/sm90")):
        said = explain(*tensors, backward=backward, cu_seqlens_q=cu, causal=True, window=window)
        assert kernel in said.splitlines()[1], said


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, kernel", [(1, "decode/sm90"), (3, "decode/sm90"), (190, "forward/sm90")])
@pytest.mark.parametrize("dim, window", LAYERS)
def test_attends_to_pages(dim, window, tokens, kernel):
    generator = torch.Generator("cuda").manual_seed(dim)
    lengths = [509, 190, 257, 448]
    most = -(-max(lengths) // PAGE)
    pages = torch.randn(
        2, len(lengths) * most + 1, PAGE, KV_HEADS, dim, device="cuda", dtype=torch.bfloat16, generator=generator
    )
    order = torch.randperm(pages.shape[1] - 1, device="cuda", generator=generator)
    table = order.view(len(lengths), most).int()
    rows = [
        tuple(store[table[b].long()].flatten(0, 1)[:length].clone() for store in pages) for b, length in enumerate(lengths)
    ]
    for b, length in enumerate(lengths):  # what nobody sees
        last, used = divmod(length, PAGE)
        if used:
            pages[:, table[b, last], used:] = float("nan")
        table[b, last + (used > 0) :] = -1
    q = torch.randn(len(lengths), tokens, HEADS, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    options = {"seqused_kv": used, "page_table": table, "causal": True, "window": window}
    out = attention_over_cache(q, *pages, **options)
    assert torch.equal(out, attention_over_cache(q, *pages, **options, kernel=kernel))  # it is the one that was chosen
    results = [
        torch.cat(
            [
                reference.attention(q[b : b + 1].to(kind), k[None].to(kind), v[None].to(kind), causal=True, window=window)[
                    0
                ]
                for b, (k, v) in enumerate(rows)
            ]
        )
        for kind in (torch.float64, torch.bfloat16)
    ]
    assert_close(out, *results, "out")
