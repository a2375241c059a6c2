"""What the documents show in Python runs as it stands, pasted from top to bottom."""

import importlib.util
import re
import types
from pathlib import Path

import flash_attention
import pytest
import torch
from flash_attention import _core

ROOT = Path(__file__).resolve().parents[2]


def blocks(name):
    """[(where, text)]"""
    text = (ROOT / name).read_text()
    return [
        (f"{name}:{text.count(chr(10), 0, match.start()) + 1}", match[1])
        for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    ]


def test_readme_needs_nothing_besides():
    (found,) = blocks("README.md")
    names = {}
    exec(compile(found[1], found[0], "exec"), names)
    assert names["out"].shape == (2, 1024, 8, 64) and names["k"].grad.abs().sum() > 0


@pytest.mark.parametrize("where, text", blocks("docs/python.md"), ids=lambda value: value[:40].split(chr(10))[0])
def test_the_page_about_python(where, text, capsys):
    """q, k, v and a layer are the reader's."""
    names = {"flash_attention": flash_attention, "layer": types.SimpleNamespace()}
    names |= {letter: torch.randn(2, 24, 4, 64) for letter in "qkv"}
    if "jax" in text:
        if importlib.util.find_spec("jax") is None or not hasattr(_core, "jax_targets"):
            pytest.skip("built without JAX's headers")
        import jax

        names["jax"] = jax
    exec(compile(text, where, "exec"), names)
