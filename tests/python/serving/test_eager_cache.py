"""A step of decoding in C: the same bits as the general form in Python, which gets each step that C does not take."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from flash_attention import _core, routes
from flash_attention.arguments.names import renamed
from flash_attention.flash_attn import flash_attn_with_kvcache, kv_cache
from flash_attention.pytorch import ops as torch_ops
from flash_attention.torch_cache import attention_over_cache

pytestmark = pytest.mark.skipif(not torch_ops.HAS_EXCHANGE, reason="torch is older than 2.11")

PLAIN = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 0)},
    "scores": {"softmax_scale": 0.3, "softcap": 4.0},
    "lse": {"return_softmax_lse": True},
    "invariant": {"invariant": True},
}
NOT_PLAIN = {
    "sink": {"learnable_sink": torch.zeros(4)},
    "left_padding": {"cache_leftpad": torch.tensor([1, 2], dtype=torch.int32)},
    "slopes": {"alibi_slopes": torch.ones(4)},
}


@pytest.fixture
def in_python():
    """The calls that _core.attention left to Python."""
    calls = []

    def counting(*arguments, **options):
        calls.append(options)
        return routes.general(*arguments, **options)

    q = torch.randn(1, 1, 1, 8)
    attention_over_cache(q, q, q)  # the first call loads what is needed
    _core.set_python(general=counting, renamed=renamed)
    yield calls
    _core.set_python(general=routes.general, renamed=renamed)


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
        patch.setattr(kv_cache, "route", lambda: routes.general)
        return flash_attn_with_kvcache(*arguments, **options)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_same_bits_as_the_long_way(name, paged, device, in_python, monkeypatch):
    arguments, options = step(device, paged)
    options |= PLAIN[name]
    short = flash_attn_with_kvcache(*arguments, **options)
    assert not in_python
    long = long_way(monkeypatch, arguments, options)
    for one, other in zip(short, long, strict=True) if isinstance(short, tuple) else [(short, long)]:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_others_go_the_long_way(name, device, in_python):
    arguments, options = step(device, False)
    more = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in NOT_PLAIN[name].items()}
    flash_attn_with_kvcache(*arguments, **options, **more)
    assert len(in_python) == 1


def test_wrong_arguments_are_named_as_before(device, in_python):
    arguments, options = step(device, True)
    with pytest.raises((TypeError, ValueError), match=r"block_table|page_table"):
        flash_attn_with_kvcache(*arguments, **(options | {"block_table": options["block_table"].float()}))
    with pytest.raises((TypeError, ValueError), match="cache_seqlens"):
        flash_attn_with_kvcache(*arguments, **(options | {"cache_seqlens": options["cache_seqlens"][:1]}))


def steps_of_several_sizes(device):
    """[(arguments of a step, what comes of it in float64)], from the smallest workspace to the largest and back."""
    steps = []
    for keys in (512, 1024, 2048, 4096, 8192, 16384):
        q, k, v = (torch.randn(1, size, heads, 64, device=device) for size, heads in ((1, 8), (keys, 1), (keys, 1)))
        lengths = torch.tensor([keys], dtype=torch.int32, device=device)
        weights = (torch.einsum("bqhd,bkgd->bhqk", q.double(), k.double()) * 64**-0.5).softmax(-1)
        steps.append(((q, k, v, lengths), torch.einsum("bhqk,bkgd->bqhd", weights, v.double())))
    return steps + steps[::-1]


def check_step(step):
    (q, k, v, lengths), expected = step
    got = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)


def test_workspaces_of_several_sizes(device, in_python):
    for step in steps_of_several_sizes(device):
        check_step(step)
    assert not in_python


def test_workspaces_of_several_threads(device, in_python):
    """All on the default stream, one of whose workspaces is kept from call to call."""
    steps = steps_of_several_sizes(device)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check_step, steps * 4))
    assert not in_python


def test_workspaces_of_several_streams():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    steps = steps_of_several_sizes("cuda")
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got = []
    for (arguments, _), stream in zip(steps * 3, streams * 12, strict=True):
        with torch.cuda.stream(stream):
            got.append(flash_attn_with_kvcache(*arguments[:3], cache_seqlens=arguments[3]))
    torch.cuda.synchronize()
    for result, (_, expected) in zip(got, steps * 3, strict=True):
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-4)
