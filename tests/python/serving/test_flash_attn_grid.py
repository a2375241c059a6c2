"""flash_attention.flash_attn over the parameters for which FlashAttention-2 is tested: entries, lengths, head_dim, grouped
heads, masks, dropout, soft cap, ALiBi and determinism; outputs and gradients against the reference in float64. On CUDA
every pair of values occurs, and each call is repeated: its bits must not change."""

import grid
import pytest
import reference
import torch
from comparison import assert_close, exact_and_plain, gradients
from flash_attention import flash_attn

AXES = {
    "entry": ("", "qkvpacked", "kvpacked", "varlen", "varlen_qkvpacked", "varlen_kvpacked"),
    "lengths": (
        (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1, 147),
        (384, 256), (97, 97), (768, 768), (239, 1),
    ),
    "head_dim": (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256),
    "heads": ((6, 6), (6, 2), (6, 1)),
    "causal": (False, True),
    "local": (False, True),
    "dropout_p": (0.0, 0.17),
    "softcap": (0.0, 50.0),
    "alibi": (False, True),
    "deterministic": (False, True),
    "dtype": (torch.float16, torch.bfloat16),
}  # fmt: skip
SMALL = {"lengths": ((13, 23), (1, 17), (24, 11), (19, 19)), "head_dim": (16, 40, 59, 64)}


def inputs(point, device):
    """q, k, v [batch, seq, heads, head_dim]; an entry that takes them in one has one length and one kind of heads."""
    (seq_q, seq_kv), (heads, heads_kv) = point["lengths"], point["heads"]
    if "qkv" in point["entry"]:
        seq_q, heads_kv = seq_kv, heads
    shapes = ((2, seq_q, heads), (2, seq_kv, heads_kv), (2, seq_kv, heads_kv))
    return [torch.randn(*shape, point["head_dim"], device=device, dtype=point["dtype"]) for shape in shapes]


def call(point, q, k, v, **options):
    """(out, lse) by the point's entry, in the layout of the reference."""
    batch, packed = q.shape[0], point["entry"].startswith("varlen")
    sizes = ()
    if packed:
        starts = [torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tensor.shape[1] for tensor in (q, k)]
        sizes = (starts[0], q.shape[1]) if "qkv" in point["entry"] else (*starts, q.shape[1], k.shape[1])
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    if "qkv" in point["entry"]:
        tensors = (torch.stack((q, k, v), dim=-3),)
    else:
        tensors = (q, torch.stack((k, v), dim=-3)) if "kv" in point["entry"] else (q, k, v)
    name = "_".join(word for word in ("flash_attn", point["entry"], "func") if word)
    out, lse, _ = getattr(flash_attn, name)(
        *tensors, *sizes, deterministic=point["deterministic"], return_attn_probs=True, **options
    )
    if packed:
        out, lse = out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)
    return out, lse


def check(point, device):
    tensors = inputs(point, device)
    dout = torch.randn_like(tensors[0])
    slopes = 0.3 * torch.rand(2, point["heads"][0], device=device) if point["alibi"] else None
    options = {name: point[name] for name in ("causal", "softcap", "dropout_p")} | {"alibi_slopes": slopes}
    window = (37, 11) if point["local"] else (-1, -1)

    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, ())) if point["dropout_p"] else 0  # what the next call draws
    torch.manual_seed(5)
    actual = gradients(lambda q, k, v: call(point, q, k, v, window_size=window, **options), tensors, dout)
    expected = exact_and_plain(
        lambda q, k, v: reference.attention(q, k, v, window=window, seed=seed, **options), tensors, dout
    )
    for name, *three in zip(("out", "lse", "dq", "dk", "dv"), actual, *expected, strict=True):
        assert_close(*three, what=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("point", grid.pairs(AXES), ids=grid.name_of)
def test_on_cuda(point):
    check(point, "cuda")
    options = {
        "causal": point["causal"],
        "softcap": point["softcap"],
        "window_size": (37, 11) if point["local"] else (-1, -1),
    }
    slopes = 0.3 * torch.rand(2, point["heads"][0], device="cuda") if point["alibi"] else None
    tensors = inputs(point, "cuda")
    first = call(point, *tensors, alibi_slopes=slopes, **options)
    for _ in range(20):
        for was, now in zip(first, call(point, *tensors, alibi_slopes=slopes, **options), strict=True):
            assert torch.equal(was, now), "a repeated call gave other bits"


@pytest.mark.parametrize("point", grid.points(12, {**AXES, **SMALL}, seed=1), ids=grid.name_of)
def test_on_the_cpu(point):
    check(point, "cpu")
