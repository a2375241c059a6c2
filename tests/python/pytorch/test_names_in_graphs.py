"""An error of a graph of torch.compile names arguments as its caller does, although the graph has no entrance."""

import pytest
import torch
from flash_attention import attention, scaled_dot_product_attention
from flash_attention.append import append_kv
from flash_attention.arguments.names import Renamed, as_text, refusal, renamed_by
from flash_attention.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Q = torch.randn(2, 4, 2, 16)
LENGTHS = torch.tensor([1, 2, 3], dtype=torch.int32)
TABLE = torch.zeros(3, 1, dtype=torch.int32)
STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)


def append(q):
    k_cache, v_cache = q.clone(), q.clone()
    with Renamed({"lengths": "lengths_of_cache"}):
        append_kv(k_cache, v_cache, q, q, lengths=LENGTHS)
    return k_cache + v_cache


WRONG = {
    "softmax_scale": lambda q: flash_attn_func(q, q, q, softmax_scale=float("nan")),
    r"window_size\[0\]": lambda q: flash_attn_func(q, q, q, window_size=(-5, 0)),
    "cu_seqlens_k": lambda q: flash_attn_varlen_func(q[0], q[0], q[0], STARTS, LENGTHS[:2], 4, 4),
    "cache_seqlens": lambda q: flash_attn_with_kvcache(q[:, :1], q, q, cache_seqlens=LENGTHS),
    "block_table": lambda q: flash_attn_with_kvcache(q[:, :1], q, q, cache_seqlens=LENGTHS[:2], block_table=TABLE),
    "attn_mask": lambda q: scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(1, 1, 5, 5)),
    "scale": lambda q: attention(q, q, q, scale=float("nan")),
    "lengths_of_cache": append,
}


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("name", WRONG)
def test_an_error_of_a_graph_is_in_the_words_of_the_caller(name, grad):
    if grad and ("cache" in name or "table" in name):
        pytest.skip("forward only")
    torch._dynamo.reset()
    q = Q.clone().requires_grad_(grad)
    run = torch.compile(WRONG[name], backend="aot_eager", fullgraph=True)
    with pytest.raises((ValueError, RuntimeError), match=f"^{name}: "):
        run(q)
    assert as_text() == ""


def test_tables_as_text():
    """Of two entrances the inner one's names are put in first."""
    inner, outer = {"page_table": "block_table", "k": "key"}, {"key": "keys[0]"}
    for argument, expected in (("k", "keys[0]: as block_table"), ("v", "v: as block_table")):
        with pytest.raises(ValueError, match="^" + expected.replace("[", r"\[")), Renamed(inner, outer):
            raise refusal(ValueError, argument, "as {page_table}")
    text = "page_table=block_table,k=key;key=keys[0]"
    assert renamed_by(text).tables == (inner, outer) and renamed_by("").tables == renamed_by().tables == ()
