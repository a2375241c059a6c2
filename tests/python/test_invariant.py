"""invariant=True: the same bits of a row from every entry, in every company."""

import ast
import os
import subprocess
import sys

import invariant_caches
import invariant_mixes
import pytest
import torch
from flash_attention import attention, attention_packed, flash_attn, flashinfer

KEYS, PAGE = 1100, 16


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def sequence(request, device):
    """q, k, v of one sequence, and its pages among others with NaN in what is not used."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(KEYS, heads, 64).to(request.param) for heads in (8, 2, 2))
    count = -(-KEYS // PAGE)
    order = torch.randperm(count + 5)[:count]
    pages = []
    for tensor in (k, v):
        store = torch.full((count + 5, PAGE, 2, 64), float("nan"), dtype=request.param)
        padded = torch.full((count * PAGE, 2, 64), float("nan"), dtype=request.param)
        padded[:KEYS] = tensor
        store[order] = padded.unflatten(0, (count, PAGE))
        pages.append(store.to(device))
    return [tensor.to(device) for tensor in (q, k, v)], pages, order.int().to(device)


@pytest.mark.parametrize("window", [(-1, 0), (600, 0)], ids=str)
def test_a_token_has_the_same_bits_from_every_entry(sequence, window, device):
    (q, k, v), (k_pages, v_pages), order = sequence
    last = 6
    options = {"window": window, "invariant": True}
    want, want_lse = attention(q[None], k[None], v[None], return_lse=True, **options)
    want, want_lse = want[0, -last:], want_lse[0, :, -last:]
    ints = {"dtype": torch.int32, "device": device}

    chunk = attention(q[None, -last:], k[None], v[None], **options)[0]
    assert torch.equal(chunk, want)

    wider = torch.cat([k, torch.full_like(k[:300], float("nan"))])[None].expand(3, -1, -1, -1)
    used = torch.tensor([9, KEYS, 0], **ints)
    values = torch.cat([v, v[:300]])[None].expand(3, -1, -1, -1)
    batch = attention(q[None, -last:].expand(3, -1, -1, -1), wider, values, seqused_kv=used, **options)
    assert torch.equal(batch[1], want)

    starts = [torch.tensor([0, *sizes], **ints).cumsum(0).int() for sizes in ((30, last), (30, KEYS))]
    joined = [torch.cat([a[:30], b]) for a, b in ((q, q[-last:]), (k, k), (v, v))]
    packed, lse = attention_packed(*joined, *starts, return_lse=True, **options)
    assert torch.equal(packed[30:], want) and torch.equal(lse[:, 30:], want_lse)

    table = torch.stack([order, order.flip(0)])
    for i in range(last):  # decoded one by one, beside another sequence
        held = torch.tensor([KEYS - last + i + 1, 40 + i], **ints)
        token = torch.stack([q[KEYS - last + i], q[i]])[:, None]
        call = {"cache_seqlens": held, "window_size": window, "causal": True, "return_softmax_lse": True}
        out, lse = flash_attn.flash_attn_with_kvcache(token, k_pages, v_pages, block_table=table, invariant=True, **call)
        assert torch.equal(out[0, 0], want[i]) and torch.equal(lse[0, :, 0], want_lse[:, i])


def test_flashinfers_fixed_split_size_asks_for_it(sequence, device):
    (q, k, v), (k_pages, v_pages), order = sequence
    want = attention(q[None], k[None], v[None], causal=True, invariant=True)[0, -1]
    indptr = torch.tensor([0, len(order), len(order) + 2], dtype=torch.int32, device=device)
    indices, last = torch.cat([order, order[:2]]), torch.tensor([KEYS - (len(order) - 1) * PAGE, 3], device=device).int()
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device=device))
    decode.plan(indptr, indices, last, 8, 2, 64, PAGE, fixed_split_size=4)
    assert torch.equal(decode.run(torch.stack([q[-1], q[0]]), (k_pages, v_pages))[0], want)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, device=device))
    starts = torch.tensor([0, 20, 21], dtype=torch.int32, device=device)
    prefill.plan(starts, indptr, indices, last, 8, 2, 64, PAGE, causal=True, fixed_split_size=4)
    assert torch.equal(prefill.run(torch.cat([q[-20:], q[:1]]), (k_pages, v_pages))[19], want)


def test_a_kernel_cannot_be_named_besides():
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError, match="kernel: got 'cpu/decode'; with invariant=True allowed is None"):
        attention(q, q, q, kernel="cpu/decode", invariant=True)


BY_DEFAULT = """
import torch, flash_attention
from flash_attention import attention, attention_over_cache, attention_packed, explain
q, k, v = torch.randn(3, 1, 300, 4, 64).bfloat16()
starts = torch.tensor([0, 300], dtype=torch.int32)
last = torch.tensor([300], dtype=torch.int32)
def bits(**flag):
    def learned(*leaves):
        return torch.autograd.grad(attention(*leaves, causal=True, **flag).square().sum(), leaves)
    return (
        attention(q, k, v, causal=True, **flag), attention_packed(q[0], k[0], v[0], starts, causal=True, **flag),
        attention_over_cache(q[:, -1:], k, v, seqused_kv=last, **flag), *learned(*(x.requires_grad_() for x in (q, k, v))),
    )
same = [all(map(torch.equal, bits(), bits(invariant=flag))) for flag in (True, False)]
said = "invariant" in explain(q, k, v), "invariant" in explain(q, k, v, invariant=False)
traced = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), backend="aot_eager")(q, k, v)
same.append(torch.equal(traced, attention(q, k, v, causal=True, invariant=True)))
refused = []
for options in ({"kernel": "cpu/prefill"}, {"kernel": "standard"}, {"tile": (64, 64)}):
    try:
        attention(q, k, v, **options)
    except (ValueError, NotImplementedError) as error:
        refused.append(str(error))
attention(q, k, v, kernel="standard", invariant=False)
found = [finding["detail"] for finding in flash_attention._core.diagnose() if finding["subject"] == "invariant bits"]
print((same, said, refused, found))
"""


def test_the_environment_gives_the_default():
    """Every entrance, a trace, explain and the findings; invariant=False is stronger, and a kernel by name is refused."""
    said = {}
    for value in ("", "1"):
        environment = {**os.environ, "FLASH_ATTENTION_INVARIANT": value}
        done = subprocess.run([sys.executable, "-c", BY_DEFAULT], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said[value] = ast.literal_eval(done.stdout)
    same, explained, refused, (found,) = said["1"]
    assert same == [True, False, True] and explained == (True, False)
    assert found.startswith("FLASH_ATTENTION_INVARIANT is on")
    on = "FLASH_ATTENTION_INVARIANT is on: allowed is None, or invariant=False"
    assert refused == [f"kernel: got 'cpu/prefill'; {on}", f"kernel: got 'standard'; {on}", f"tile: was given; {on}"]
    same, explained, refused, (found,) = said[""]
    assert same == [False, True, False] and explained == (False, False) and "FLASH_ATTENTION_INVARIANT=1" in found


@pytest.mark.parametrize("number", [n if n < 8 else pytest.param(n, marks=pytest.mark.long_tail) for n in range(48)])
def test_random_mixes(number, device):
    """A sequence alone, in chunks, one query at a time, in batches, in pages and packed, and its gradients."""
    names = list(invariant_mixes.CONFIGURATIONS)
    found = invariant_mixes.compare(number, names[number * 3 % len(names)], device)
    assert {way for way, _ in found} >= {"packed", "batch"} and all(ok for _, ok in found), found


@pytest.mark.parametrize("name", invariant_caches.CONFIGURATIONS)
def test_caches_of_eight_bits_and_latent_keys(name, device):
    """A row alone, in chunks, in batches, in pages and packed."""
    found = invariant_caches.compare(5, name, device)
    assert {way for way, _ in found} >= {"packed over pages", "batch"} and all(ok for _, ok in found), found


def test_queries_of_eight_bits(device):
    """They are computed as if alone, too: in a batch, as the last rows, beside other heads."""
    q, k, v = torch.randn(3, 3, 300, 4, 64).to(device, torch.float8_e4m3fn)
    options = {"causal": True, "invariant": True, "q_descale": 0.5, "return_lse": True}
    want, want_lse = attention(q, k, v, **options)
    for b, first in ((0, 0), (1, 250), (2, 299)):
        out, lse = attention(q[b : b + 1, first:], k[b : b + 1], v[b : b + 1], **options)
        assert torch.equal(out[0], want[b, first:]) and torch.equal(lse[0], want_lse[b, :, first:])
    out, lse = attention(q[:1, :, 2:3], k[:1, :, 2:3], v[:1, :, 2:3], **options)
    assert torch.equal(out[0], want[0, :, 2:3]) and torch.equal(lse[0], want_lse[0, 2:3])


def test_the_number_of_threads_moves_no_bit():
    """Two processes, and calls with so few blocks of rows that without the flag keys or queries are split among threads."""
    script = (
        "import hashlib, torch; from flash_attention import attention\n"
        "torch.manual_seed(0); found = hashlib.sha256()\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "  for batch, queries, keys, heads in ((2, 130, 700, 6), (1, 1, 900, 1), (1, 333, 333, 1)):\n"
        "    make = lambda *shape: torch.randn(*shape).to(dtype).requires_grad_()\n"
        "    q, k, v = make(batch, queries, heads, 64), make(batch, keys, heads, 64), make(batch, keys, heads, 64)\n"
        "    out, lse = attention(q, k, v, causal=True, invariant=True, return_lse=True)\n"
        "    for part in (out, lse, *torch.autograd.grad((out * out).sum() + lse.sum(), (q, k, v))):\n"
        "      found.update(part.detach().float().numpy().tobytes())\n"
        "print(found.hexdigest())"
    )
    bits = []
    for threads in ("2", "16"):
        environment = {**os.environ, "FLASH_ATTENTION_THREADS": threads, "FLASH_ATTENTION_THREAD_SOURCE": "own"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        bits.append(done.stdout)
    assert bits[0] == bits[1] and len(bits[0].strip()) == 64
