"""The fast path of a plain decoding step: the same bits as the general path, which every call that is not plain takes."""

import pytest
import torch
from flash_attention import _core
from flash_attention.flash_attn import flash_attn_with_kvcache
from flash_attention.pytorch import ops as torch_ops
from flash_attention.torch_cache import attention_over_cache

pytestmark = pytest.mark.skipif(not torch_ops.HAS_EXCHANGE, reason="torch is older than 2.11")

PLAIN = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 0)},
    "scores": {"softmax_scale": 0.3, "softcap": 4.0},
    "lse": {"return_softmax_lse": True},
}
NOT_PLAIN = {
    "sink": {"learnable_sink": torch.zeros(4)},
    "left_padding": {"cache_leftpad": torch.tensor([1, 2], dtype=torch.int32)},
    "slopes": {"alibi_slopes": torch.ones(4)},
    "invariant": {"invariant": True},
}


@pytest.fixture
def short_calls(monkeypatch):
    """The answers of the fast path, None where it declined."""
    answers = []
    original = _core.attend_cache

    def counting(*arguments):
        answers.append(original(*arguments))
        return answers[-1]

    monkeypatch.setattr(_core, "attend_cache", counting)
    q = torch.randn(1, 1, 1, 8)
    attention_over_cache(q, q, q)  # the first call loads what is needed
    answers.clear()
    return answers


def step(device, paged):
    """(arguments, options): two sequences of 37 and 20 keys, two new queries each."""
    q = torch.randn(2, 2, 4, 32, device=device)
    lengths = torch.tensor([37, 20], dtype=torch.int32, device=device)
    if not paged:
        k, v = (torch.randn(2, 48, 2, 32, device=device) for _ in range(2))
        return (q, k, v), {"cache_seqlens": lengths}
    k, v = (torch.randn(9, 16, 2, 32, device=device) for _ in range(2))
    table = torch.tensor([[7, 1, 4], [2, 8, -1]], dtype=torch.int32, device=device)
    return (q, k, v), {"cache_seqlens": lengths, "block_table": table}


def long_way(monkeypatch, arguments, options):
    with monkeypatch.context() as patch:
        patch.setattr(_core, "attend_cache", lambda *_: None)
        return flash_attn_with_kvcache(*arguments, **options)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_same_bits_as_the_long_way(name, paged, device, short_calls, monkeypatch):
    arguments, options = step(device, paged)
    options |= PLAIN[name]
    short = flash_attn_with_kvcache(*arguments, **options)
    assert len(short_calls) == 1 and short_calls[0] is short
    long = long_way(monkeypatch, arguments, options)
    for one, other in zip(short, long, strict=True) if isinstance(short, tuple) else [(short, long)]:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_others_go_the_long_way(name, device, short_calls):
    arguments, options = step(device, False)
    more = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in NOT_PLAIN[name].items()}
    flash_attn_with_kvcache(*arguments, **options, **more)
    assert short_calls in ([], [None])


def test_wrong_arguments_are_named_as_before(device, short_calls):
    arguments, options = step(device, True)
    with pytest.raises((TypeError, ValueError), match=r"block_table|page_table"):
        flash_attn_with_kvcache(*arguments, **(options | {"block_table": options["block_table"].float()}))
    with pytest.raises((TypeError, ValueError), match="cache_seqlens"):
        flash_attn_with_kvcache(*arguments, **(options | {"cache_seqlens": options["cache_seqlens"][:1]}))
    assert all(answer is None for answer in short_calls)


def test_workspaces_of_several_sizes(short_calls):
    """More sizes of workspace than are remembered, forwards and again."""
    calls = []
    for keys in (512, 1024, 2048, 4096, 8192, 16384):
        q, k = torch.randn(1, 1, 8, 64), torch.randn(1, keys, 1, 64)
        calls.append((q, k, k.flip(1), torch.tensor([keys], dtype=torch.int32)))
    for q, k, v, lengths in calls + calls[::-1]:
        got = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
        weights = (torch.einsum("bqhd,bkgd->bhqk", q.double(), k.double()) * 64**-0.5).softmax(-1)
        want = torch.einsum("bhqk,bkgd->bqhd", weights, v.double())
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)
    assert len(short_calls) == 12 and all(answer is not None for answer in short_calls)
