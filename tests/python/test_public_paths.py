"""Every path by which programs import something of the package: a module may move, its path stays."""

import importlib
import importlib.util
from pathlib import Path

import pytest

PATHS = dict(line.partition(": ")[::2] for line in Path(__file__).with_name("public_paths.txt").read_text().splitlines())
_NEEDS = {"flash_attention.engines.vllm": "vllm", "flash_attention.engines.sglang": "sglang", "flash_attention.jax": "jax"}
_NEEDS |= {"flash_attention.hugging_face": "transformers"}


@pytest.mark.parametrize("path", PATHS)
def test_it_is_there(path):
    needs = _NEEDS.get(path)
    if needs and importlib.util.find_spec(needs) is None:
        assert importlib.util.find_spec(path) is not None
        return
    module = importlib.import_module(path)
    assert [name for name in PATHS[path].split() if not hasattr(module, name)] == []
