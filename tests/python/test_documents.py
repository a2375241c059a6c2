"""What the documents show in Python runs as it stands, pasted from top to bottom."""

import importlib.util
import re
import types
from pathlib import Path

import flash_attention
import pytest
import torch
from flash_attention import _core, flash_attn, flash_attn_3, flash_attn_4, flash_mla, flashinfer
from flash_attention.flash_attn import bert_padding
from flash_attention.flash_attn.layers import rotary

ROOT = Path(__file__).resolve().parents[2]


def blocks(name):
    """[(where, text)]"""
    text = (ROOT / name).read_text()
    return [
        (f"{name}:{text.count(chr(10), 0, match.start()) + 1}", match[1])
        for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    ]


@pytest.mark.parametrize("page", ["README.md", "python/README.md"])
def test_readme_needs_nothing_besides(page):
    (found,) = blocks(page)
    names = {}
    exec(compile(found[1], found[0], "exec"), names)
    assert names["out"].shape == (2, 1024, 8, 64) and names["k"].grad.abs().sum() > 0


PAGES = [*blocks("docs/python.md"), *blocks("docs/migration.md"), *blocks("docs/masks.md"), *blocks("docs/sparse.md")]


@pytest.mark.parametrize("where, text", PAGES, ids=[where for where, _ in PAGES])
def test_the_pages_about_python(where, text, capsys, tmp_path, monkeypatch):
    """q, k, v, torch and a layer are the reader's."""
    names = {"flash_attention": flash_attention, "torch": torch, "layer": types.SimpleNamespace()}
    if "varlen import" in text:
        pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.9 has no varlen_attn")
    if "transformers import" in text:
        pytest.importorskip("transformers")
    if "masks." in text:
        names |= {"attention": flash_attention.attention, "masks": flash_attention.masks}
        monkeypatch.chdir(tmp_path)
    names |= {letter: torch.randn(2, 24, 4, 64) for letter in "qkv"}
    if "jax" in text:
        if importlib.util.find_spec("jax") is None or not hasattr(_core, "jax_targets"):
            pytest.skip("built without JAX's headers")
        import jax

        names["jax"] = jax
    exec(compile(text, where, "exec"), names)


@pytest.mark.parametrize("page", ["train", "serve", "long_sequences"])
def test_a_guide_runs_from_top_to_bottom(page, capsys):
    if page == "train":
        pytest.importorskip("transformers")
    names = {}
    for where, text in blocks(f"docs/guides/{page}.md"):
        exec(compile(text, where, "exec"), names)


def test_every_entry_has_an_example():
    """Whatever a module offers stands in a block that the test above runs; parallel and tune have pages of their own."""
    shown = "\n".join(text for _, text in PAGES)
    graph_or_levels = {"CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper"}
    modules = {
        flash_attention: set(flash_attention.__all__) - {"parallel", "tune", "export_tuned", "import_tuned"},
        flash_attn: flash_attn.__all__,
        flash_attn_3: flash_attn_3.__all__,
        flash_attn_4: flash_attn_4.__all__,
        flash_mla: flash_mla.__all__,
        flashinfer: set(flashinfer.__all__) - graph_or_levels,
        bert_padding: [name for name, value in vars(bert_padding).items() if isinstance(value, types.FunctionType)],
        rotary: set(rotary.__all__) - {"apply_rotary_emb_func"},
    }
    for module, names in modules.items():
        missing = [name for name in names if not re.search(rf"\b{name}\b", shown)]
        assert not missing, f"{module.__name__}: {missing}"
    if hasattr(_core, "jax_targets") and importlib.util.find_spec("jax"):
        assert all(name in shown for name in ("flash_attention.jax", "dot_product_attention", "attention_packed"))
