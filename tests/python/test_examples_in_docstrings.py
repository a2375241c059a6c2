"""Each public function has an example in its docstring, and it runs. q, k, v and torch are the reader's."""

import inspect
import re
import textwrap

import flash_attention
import pytest
import torch
from flash_attention import flash_attn, flash_attn_3, flash_attn_4, flash_mla, flashinfer, masks, parallel, sparse, xformers

MODULES = (
    flash_attention,
    flash_attn,
    flash_attn_3,
    flash_attn_4,
    flash_mla,
    flashinfer,
    masks,
    parallel,
    sparse,
    xformers,
)
# tune and its kin measure a GPU; the others need a group of processes or a model: tests/python/parallel.
NOT_RUN = {"tune", "export_tuned", "import_tuned", "context_attention", "parallelize_transformers"}
NOT_RUN |= {"register_context_parallel", "unregister_context_parallel", "register_transformers"}
LAYERS = {"FlashAttention", "StandardAttention", "MultiheadAttention"}


def public_functions():
    for module in MODULES:
        for name in getattr(module, "__all__", ()) or [name for name in vars(module) if not name.startswith("_")]:
            value = None if name == "jax" else getattr(module, name)
            if inspect.isfunction(value) or name in LAYERS:
                yield pytest.param(module, name, id=f"{module.__name__.rpartition('.')[2]}.{name}")


def examples(text):
    """What is indented behind an empty line."""
    return [textwrap.dedent(found) for found in re.findall(r"\n\n((?:    .*(?:\n|$))+)", text)]


@pytest.mark.parametrize(("module", "name"), public_functions())
def test_an_example(module, name, capsys):
    value = getattr(module, name)
    found = examples(inspect.getdoc(inspect.unwrap(value)) or "")
    assert found, f"{name}: its docstring has no example"
    if name in NOT_RUN:
        return
    assert any(f"{name}(" in text for text in found), f"{name}: the example does not call it"
    names = {"torch": torch, "attention": flash_attention.attention} | {each: getattr(module, each) for each in dir(module)}
    names |= {letter: torch.randn(2, 16, 4, 64) for letter in "qkv"}
    if name == "flash_attn":
        pytest.importorskip("torch")
    for text in found:
        exec(text, dict(names))
    assert "Error" not in capsys.readouterr().out


def test_help_begins_with_attention():
    """help(flash_attention): what most people look for comes first, and every name is in the list."""
    text = inspect.getdoc(flash_attention)
    assert text.startswith("attention(q, k, v, ")
    missing = [
        name for name in flash_attention.__all__ if not name.startswith("__") and not re.search(rf"\b{name}\b", text)
    ]
    assert not missing
