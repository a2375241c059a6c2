"""A compiled function may be the first to use the package, whatever else torch.compile does to it."""

import subprocess
import sys

import pytest

IMPORTS = "import torch\nfrom flash_attention import FlashAttention, attention, flash_attn\n"
LEAF = "q = torch.randn(1, 8, 2, 16, requires_grad=True)\n"
BREAKS = """
def step(q):
    x = {call}
    torch._dynamo.graph_break()
    return x.sum() + {call}.sum()
torch.compile(step, backend="aot_eager")(q).backward()
"""
LENGTHS = """
step = torch.compile(lambda q: {call}.sum(), backend="aot_eager", fullgraph=True, dynamic=True)
step(q).backward()
{call}
torch._dynamo.config.error_on_recompile = True
for length in (9, 40):
    step(torch.randn(1, length, 2, 16, requires_grad=True)).backward()
"""
MODEL = """
import torch, transformers, flash_attention
flash_attention.register_transformers()
config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention")
compiled = torch.compile(model, backend="aot_eager")
for length in (19, 23):
    compiled(torch.randint(1, 64, (2, length))).logits.sum().backward()
"""
SCORES = """
slopes = torch.rand(2, requires_grad=True)
scores = lambda s, b, h, i, j: s + slopes[h] * (i - j)
"""
UNTRACED = """
import sys
attention(q, q, q, causal=True).sum().backward()
attention(q, q, q, score_mod=scores, mask_mod=lambda b, h, i, j: i >= j).sum().backward()
assert "torch._dynamo" not in sys.modules  # its import takes longer than the compiler of a GPU kernel
def step(q):
    return attention(q * 2, q, q, score_mod=scores).sin()
expected = step(q)
import torch._dynamo.testing
counter = torch._dynamo.testing.CompileCounter()
compiled = torch.compile(step, backend=counter)
assert torch.equal(compiled(q), expected)
assert torch.equal(compiled(q), expected)
assert counter.frame_count == 2, counter.frame_count  # before the call and after it, and nothing within
try:
    torch.compile(step, fullgraph=True, backend="eager")(q)
except torch._dynamo.exc.Unsupported:
    pass
else:
    raise AssertionError("a program was traced")
"""
PROGRAMS = {
    "programs": IMPORTS + LEAF + SCORES + UNTRACED,
    "attention": IMPORTS + LEAF + LENGTHS.format(call="attention(q, q, q)"),
    "flash_attn": IMPORTS + LEAF + LENGTHS.format(call="flash_attn.flash_attn_func(q, q, q)"),
    "module": IMPORTS + LEAF + "module = FlashAttention()\n" + BREAKS.format(call="module(q, q, q)"),
    "torch_later": "from flash_attention import attention\nimport torch\n"
    + LEAF
    + BREAKS.format(call="attention(q, q, q)")
    + LENGTHS.format(call="attention(q, q, q)"),
    "transformers": MODEL,
}


LONG_TAIL = ("attention", "flash_attn", "module", "transformers")  # what "torch_later" shows, by other doors


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long_tail if name in LONG_TAIL else ()) for name in PROGRAMS]
)
def test_program(name, warm_python):
    if name == "transformers":
        pytest.importorskip("transformers")
    if name == "torch_later":
        done = subprocess.run([sys.executable, "-c", PROGRAMS[name]], capture_output=True, text=True, timeout=300)
    else:
        done = warm_python("-c", PROGRAMS[name])
    assert done.returncode == 0, done.stderr[-2000:]
