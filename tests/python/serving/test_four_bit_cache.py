"""Caches of 4 bits: codes and scales of every value, append_kv against quantize_cache, attention against float64."""

import itertools

import numpy
import pytest
import torch
from flash_attention import attention_over_cache, dequantize_cache, quantize_cache
from flash_attention.append import append_kv
from torch._subclasses.fake_tensor import FakeTensorMode

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
FORMATS = [("nvfp4", 16), ("mxfp4", 32), ("int4", 32), ("int4", 64), ("int4", 128)]


def e4m3(byte):
    exponent, fraction, sign = byte >> 3 & 15, byte & 7, -1 if byte & 128 else 1
    if byte & 127 == 127:
        return float("nan")
    return sign * (fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10))


def worth(cache_dtype, byte):
    return e4m3(byte) if cache_dtype == "nvfp4" else float("nan") if byte == 255 else 2.0 ** (byte - 127)


@pytest.mark.parametrize(("cache_dtype", "group"), FORMATS[:2])
def test_every_code_with_every_scale(cache_dtype, group):
    codes = torch.arange(16).repeat(group // 16)
    packed = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).expand(256, -1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    got = dequantize_cache(packed, cache_dtype, scales, dtype=torch.float64).numpy()
    numbers = numpy.array([(-1 if c & 8 else 1) * E2M1[c & 7] for c in codes.tolist()])
    want = numpy.array([worth(cache_dtype, byte) for byte in range(256)])[:, None] * numbers
    numpy.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("cache_dtype", "group"), FORMATS)
def test_a_group_loses_at_most_half_a_step(cache_dtype, group, dtype):
    torch.manual_seed(1)
    x = (torch.randn(40, 3, 256) * torch.logspace(-3, 2, 40)[:, None, None]).to(dtype)
    x[3, 1, :] = 0
    found = quantize_cache(x, cache_dtype, group=group)
    back = dequantize_cache(found.codes, cache_dtype, found.scale, found.zero, dtype=torch.float64)
    grouped, error = x.double().unflatten(-1, (-1, group)), (back - x.double()).abs().unflatten(-1, (-1, group))
    if cache_dtype == "int4":
        rounding = 2 * torch.finfo(dtype).eps * grouped.abs().amax(-1)
        step = (grouped.amax(-1) - grouped.amin(-1)) / 15 * (0.5 + 8 * torch.finfo(dtype).eps) + 2 * rounding
    else:  # codes 4 and 6 are two scales apart; nvfp4's scale may be a 16th too small
        step = grouped.abs().amax(-1) / (6 if cache_dtype == "nvfp4" else 3) * 1.07
    least = 7 * 2.0**-10 if cache_dtype == "nvfp4" else 2.0**-24  # its scales are multiples of 2^-9
    assert (error.amax(-1) <= step + least).all()
    again = quantize_cache(back.to(dtype), cache_dtype, group=group)
    if cache_dtype == "mxfp4":  # what codes say is what they say again, in value
        repeated = dequantize_cache(again.codes, cache_dtype, again.scale, dtype=torch.float64)
        torch.testing.assert_close(repeated, back, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("cache_dtype", "group"), FORMATS)
def test_append_writes_what_quantize_cache_says(cache_dtype, group, dtype):
    torch.manual_seed(2)
    k = (torch.randn(2, 7, 3, 128) * torch.logspace(-4, 3, 7)[:, None, None]).to(dtype)
    v = torch.randn(2, 7, 3, 256).to(dtype)
    k[0, 2, 1, 5] = float("inf")
    k[1, 3, 0, 70], v[0, 1, 2, 9] = float("nan"), float("nan")
    k[0, 4, 0] = 0
    factors = {"k_global_scale": 0.03, "v_global_scale": 2.0} if cache_dtype == "nvfp4" else {}
    wanted = [
        quantize_cache(x, cache_dtype, group=group, global_scale=factors.get(f"{name}_global_scale"))
        for name, x in (("k", k), ("v", v))
    ]
    caches = [torch.full((5, 4, 3, x.shape[-1] // 2), 0xA5, dtype=torch.uint8) for x in (k, v)]
    of_scales = [dtype if cache_dtype == "int4" else torch.uint8] * 2
    scales = [torch.zeros(5, 4, 3, x.shape[-1] // group, dtype=t) for x, t in zip((k, v), of_scales, strict=True)]
    zeros = [torch.zeros_like(s) for s in scales] if cache_dtype == "int4" else [None, None]
    table = torch.tensor([[4, 0], [2, 1]], dtype=torch.int32)
    append_kv(
        *caches, k, v, page_table=table, lengths=torch.zeros(2, dtype=torch.int32), cache_dtype=cache_dtype,
        k_scale=scales[0], v_scale=scales[1], k_zero=zeros[0], v_zero=zeros[1], **factors,
    )  # fmt: skip
    for which, want in enumerate(wanted):
        hurt = (want.zero if cache_dtype == "int4" else dequantize_cache(*want[:1], cache_dtype, want.scale)).isnan()
        hurt = hurt if cache_dtype == "int4" else hurt.unflatten(-1, (-1, group)).any(-1)
        for name, got, expected in (
            ("codes", caches[which], want.codes), ("scale", scales[which], want.scale), ("zero", zeros[which], want.zero),
        ):  # fmt: skip
            if expected is None:
                continue
            rows = got[table.long()].flatten(1, 2)[:, :7]
            same = rows == expected
            same |= torch.isnan(rows.float()) & torch.isnan(expected.float())
            if name == "scale" and cache_dtype == "int4":
                same |= hurt  # of a group with a NaN the zero is NaN, and the scale may be anything
            assert same.all(), (name, rows[~same], expected[~same])
        assert (caches[which][3] == 0xA5).all()


def reference(q, k, v, lengths, causal):
    """Attention in float64 over the first keys of each sequence."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[2])):
        keys = lengths[b]
        scores = q[b, :, h].double() @ k[b, :keys, h // group].double().T * q.shape[-1] ** -0.5
        if causal:
            i, j = torch.arange(q.shape[1])[:, None], torch.arange(keys)
            scores = scores.masked_fill(j > i + keys - q.shape[1], -torch.inf)
        out[b, :, h] = torch.softmax(scores, -1).nan_to_num(0) @ v[b, :keys, h // group].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cache_dtype", "group"), FORMATS[:4])
def test_attention_over_such_a_cache(cache_dtype, group, dtype):
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 3, 6, 128), torch.randn(2, 53, 2, 128), torch.randn(2, 53, 2, 64)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    factor = 0.125 if cache_dtype == "nvfp4" else None
    k4, v4 = (quantize_cache(x, cache_dtype, group=group, global_scale=factor) for x in (k, v))
    lengths = torch.tensor([53, 29], dtype=torch.int32)
    options = {
        "k_scale": k4.scale, "v_scale": v4.scale, "k_zero": k4.zero, "v_zero": v4.zero, "cache_dtype": cache_dtype,
        "k_global_scale": k4.global_scale, "v_global_scale": v4.global_scale, "seqused_kv": lengths, "causal": True,
    }  # fmt: skip
    out = attention_over_cache(q, k4.codes, v4.codes, **options)
    values = [
        dequantize_cache(x.codes, cache_dtype, x.scale, x.zero, x.global_scale, dtype=torch.float64) for x in (k4, v4)
    ]
    want = reference(q, *values, lengths.tolist(), True)
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    # The same rows in pages, with scales as float8.
    page = 8

    def paged(x):
        return (
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 3))
            .unflatten(1, (-1, page))
            .flatten(0, 1)[torch.tensor([9, 3, 7, 1, 5, 0, 8, 2, 6, 4, 13, 10, 12, 11])]
        )

    where = torch.empty(14, dtype=torch.int64)
    where[torch.tensor([9, 3, 7, 1, 5, 0, 8, 2, 6, 4, 13, 10, 12, 11])] = torch.arange(14)
    float8 = {"nvfp4": torch.float8_e4m3fn, "mxfp4": getattr(torch, "float8_e8m0fnu", torch.uint8)}.get(cache_dtype)
    for name in ("k_scale", "v_scale", "k_zero", "v_zero"):
        if options[name] is not None:
            options[name] = paged(options[name])
            if float8 is not None:
                options[name] = options[name].view(float8)
    again = attention_over_cache(
        q, paged(k4.codes), paged(v4.codes), page_table=where.to(torch.int32).view(2, 7), **options
    )
    torch.testing.assert_close(again, out, rtol=tolerance, atol=tolerance)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        caches = (mode.from_tensor(paged(x.codes)) for x in (k4, v4))
        traced = attention_over_cache(mode.from_tensor(q), *caches, page_table=where.to(torch.int32).view(2, 7), **fake)
    assert traced.shape == out.shape == (2, 3, 6, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_dtype": "int3"}, "cache_dtype: got 'int3'; allowed are float8_e4m3, float8_e5m2, int8, nvfp4, mxfp4"),
        ({"k_scale": None}, "have scales of groups"),
        ({"k_scale": torch.zeros(1, 9, 1, 3, dtype=torch.uint8)}, "k_scale: .*with a number for each group"),
        ({"k_scale": torch.zeros(1, 9, 1, 4)}, "k_scale: .*expected dtype uint8"),
        ({"k_zero": torch.zeros(1, 9, 1, 4)}, "k_zero: it belongs to int4"),
        ({"cache_dtype": "int4"}, "k_scale: .*expected dtype float32"),
        ({"k_global_scale": 2.0}, "k_global_scale and v_global_scale go together"),
        ({"cache_dtype": "mxfp4"}, "kv_group: got 16; allowed are 32 with mxfp4"),
        ({"invariant": True}, "kv_dtype: got nvfp4; invariant takes 8 bits, and no 4"),
        ({"key_indices": torch.zeros(1, 1, 1, 4, dtype=torch.int32)}, "keys of 4 bits"),
    ],
)
def test_refusals(change, message):
    q, codes = torch.zeros(1, 1, 1, 64), torch.zeros(1, 9, 1, 32, dtype=torch.uint8)
    scale = torch.zeros(1, 9, 1, 4, dtype=torch.uint8)
    given = {"k_scale": scale, "v_scale": scale, "cache_dtype": "nvfp4", **change}
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError), match=message):
        attention_over_cache(q, codes, codes, **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 24), "nvfp4"), "head_dim: got 24; nvfp4 takes multiples of its group, 16"),
        ((torch.zeros(2, 64), "fp4"), "cache_dtype: got 'fp4'"),
        ((torch.zeros(2, 64, dtype=torch.int8), "nvfp4"), "x: got torch.int8"),
    ],
)
def test_quantize_cache_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize_cache(*arguments)
    with pytest.raises(ValueError, match="group: got 48; allowed are 32, 64, 128 with int4"):
        quantize_cache(torch.zeros(96), "int4", group=48)
    with pytest.raises(ValueError, match="global_scale: it belongs to nvfp4"):
        quantize_cache(torch.zeros(96), "mxfp4", global_scale=2.0)
