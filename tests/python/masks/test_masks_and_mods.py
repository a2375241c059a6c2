"""The masks and score changes that FlexAttention's users write, as boolean masks, biases and options. Outputs and gradients
are compared with the reference in float64; if a boolean mask hides a key from all queries, the key holds NaN."""

import math

import pytest
import reference
import torch
from comparison import assert_close, exact_and_plain, gradients
from flash_attention import and_masks, attention, create_block_mask, or_masks
from flash_attention.arguments.options import make_options
from flash_attention.flex import attention as flex
from flash_attention.flex.program import record
from flash_attention.options import Tensors

SEQ = 67  # a prime: no tile is full


def indices(seq):
    return torch.arange(seq)[:, None], torch.arange(seq)[None, :]


def document(seq):
    q, kv = indices(seq)
    of = torch.bucketize(torch.arange(seq), torch.tensor([9, 10, 40]), right=True)
    return (of[q] == of[kv]) & (q >= kv)


def prefix_lm(seq):
    q, kv = indices(seq)
    return (kv < 13) | (q >= kv)


def sliding_tile(seq):
    q, kv = indices(seq)
    return (q // 8 - kv // 8).abs() <= 1


def neighbourhood(seq):
    """A window in two dimensions over an image nine wide."""
    q, kv = indices(seq)
    return ((q // 9 - kv // 9).abs() <= 2) & ((q % 9 - kv % 9).abs() <= 2)


def dilated(seq):
    q, kv = indices(seq)
    return (q >= kv) & ((q - kv) % 3 == 0) & (q - kv <= 30)


def block_diffusion(seq):
    """Noisy blocks see themselves and the clean blocks before them; clean ones are causal by block."""
    half, block = seq // 2, 5
    q, kv = indices(seq)
    noisy_q, noisy_kv = q < half, kv < half
    block_q, block_kv = (q % half) // block, (kv % half) // block
    own = noisy_q & noisy_kv & (block_q == block_kv)
    return own | (noisy_q & ~noisy_kv & (block_q > block_kv)) | (~noisy_q & ~noisy_kv & (block_q >= block_kv))


def shared_prefix(seq):
    q, kv = indices(seq)
    suffix_q, suffix_kv = (q - 20).clamp(min=0) // 12, (kv - 20).clamp(min=0) // 12
    return (q >= kv) & ((kv < 20) | (suffix_q == suffix_kv))


def tree(seq):
    """A key is seen by itself and its descendants in a binary tree."""
    visible = torch.zeros(seq, seq, dtype=torch.bool)
    for q in range(seq):
        node = q + 1
        while node:
            visible[q, node - 1] = True
            node //= 2
    return visible


def nothing_for_some(seq):
    q, kv = indices(seq)
    return (q % 5 != 2) & (kv % 7 != 3)


MASKS = (document, prefix_lm, sliding_tile, neighbourhood, dilated, block_diffusion, shared_prefix, tree, nothing_for_some)


def tensors(device, dtype, heads=4, heads_kv=2, head_dim=40):
    return [torch.randn(2, SEQ, count, head_dim, device=device, dtype=dtype) for count in (heads, heads_kv, heads_kv)]


def check(q, k, v, ours, formula=None):
    dout = torch.randn_like(q)
    formula = ours if formula is None else formula
    actual = gradients(lambda *x: attention(*x, return_lse=True, **ours), (q, k, v), dout)
    expected = exact_and_plain(lambda *x: reference.attention(*x, **formula), (q, k, v), dout)
    for name, *three in zip(("out", "lse", "dq", "dk", "dv"), actual, *expected, strict=True):
        assert_close(*three, what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", MASKS, ids=lambda make: make.__name__)
def test_mask(make, dtype, device):
    check(*tensors(device, dtype), {"mask": make(SEQ).to(device)})


@pytest.mark.parametrize("make", MASKS[:4], ids=lambda make: make.__name__)
def test_mask_with_softcap_alibi_and_sink(make, device):
    options = {
        "mask": make(SEQ).to(device),
        "softcap": 5.0,
        "alibi_slopes": torch.tensor([0.5, 0.1, 0.0, 2.0], device=device),
        "sink": torch.tensor([-1.0, 0.0, 1.0, 20.0], device=device),
    }
    check(*tensors(device, torch.float16), options)


def relative_bias(heads, device):
    """T5's: a learned number for each bucket of distances."""
    q, kv = indices(SEQ)
    far = (q - kv).abs().clamp(min=1)
    bucket = torch.where(far < 8, far, 8 + (far.float() / 8).log().div(math.log(16) / 8).int()).clamp(max=15)
    return torch.randn(heads, 16)[:, bucket].to(device)


def graph_bias(heads, device):
    """Graphormer's: by the length of the shortest path, here on a ring; unreachable nodes are far from visible."""
    q, kv = indices(SEQ)
    steps = torch.minimum((q - kv) % SEQ, (kv - q) % SEQ)
    table = torch.linspace(1, -30, SEQ // 2 + 1)
    return table[steps].expand(heads, SEQ, SEQ).contiguous().to(device)


@pytest.mark.parametrize("make", [relative_bias, graph_bias], ids=lambda make: make.__name__)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bias_and_its_gradient(make, causal, device):
    q, k, v = tensors(device, torch.float32)
    bias, dout = make(4, device), torch.randn_like(q)

    def ours(q, k, v, bias):
        return attention(q, k, v, bias=bias, causal=causal, return_lse=True)

    def formula(q, k, v, bias):
        return reference.attention(q, k, v, bias=bias, causal=causal)

    actual = gradients(ours, (q, k, v, bias), dout)
    expected = exact_and_plain(formula, (q, k, v, bias), dout)
    for name, *three in zip(("out", "lse", "dq", "dk", "dv", "dbias"), actual, *expected, strict=True):
        assert_close(*three, what=name)


def test_nan_behind_a_mask_stays_there(device):
    q, k, v = tensors(device, torch.float32)
    mask = nothing_for_some(SEQ).to(device)
    hidden = ~mask.any(0)
    clean_k, clean_v = (x.masked_fill(hidden[None, :, None, None], 0.0) for x in (k, v))
    wild_k, wild_v = (x.masked_fill(hidden[None, :, None, None], math.nan) for x in (k, v))
    dout = torch.randn_like(q)
    expected = gradients(lambda *x: attention(*x, mask=mask, return_lse=True), (q, clean_k, clean_v), dout)
    actual = gradients(lambda *x: attention(*x, mask=mask, return_lse=True), (q, wild_k, wild_v), dout)
    for was, now in zip(expected, actual, strict=True):
        assert torch.equal(was, now)


def test_several_masks_of_one_program(device):
    """All of them hide."""
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(device, torch.float32))
    parts = [lambda b, h, i, j: i >= j, lambda b, h, i, j: j % 3 != 1, lambda b, h, i, j: (i - j < 20) | (j == 0)]
    program = record(None, parts[0], parts[1:])
    given = Tensors(q, k.contiguous(), v)
    out, _ = flex._attend(program, given, make_options(alignment="top_left", layout="bhsd"), 0, 0, True, None)
    i, j = indices(SEQ)
    seen = (i >= j) & (j % 3 != 1) & ((i - j < 20) | (j == 0))
    want, _ = reference.attention(*(x.transpose(1, 2).double() for x in (q, k, v)), mask=seen[None, None].to(device))
    torch.testing.assert_close(out.transpose(1, 2).double(), want, atol=1e-5, rtol=1e-4)


def test_masks_of_none():
    """As in torch: all of no conditions hold, and not one of them does."""
    q = torch.randn(1, 2, 12, 16)
    seen = attention(q, q, q, layout="bhsd", block_mask=create_block_mask(and_masks()))
    assert torch.equal(seen, attention(q, q, q, layout="bhsd"))
    assert attention(q, q, q, layout="bhsd", block_mask=create_block_mask(or_masks())).eq(0).all()


def test_wrong_numbers_of_axes_beside_a_block_mask():
    q = torch.randn(8, 12, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 12, 12)
    with pytest.raises(ValueError, match=r"q: got float32\[8, 12, 16\]; expected 4 axes"):
        attention(q, q, q, block_mask=mask)
