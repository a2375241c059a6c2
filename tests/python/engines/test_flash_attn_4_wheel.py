"""The names, the order and the defaults of FlashAttention-4's arguments, as its own wheel has them."""

import ast

import pytest
from engine_wheels import check_arguments, folder_of, parameters_of

flash_attn_4 = pytest.importorskip("flash_attention.flash_attn_4")


@pytest.mark.parametrize("name", flash_attn_4.__all__)
def test_arguments_are_those_of_the_wheel(name):
    text = (folder_of("flash-attn-4") / "flash_attn" / "cute" / "interface.py").read_text()
    (theirs,) = (node for node in ast.parse(text).body if getattr(node, "name", None) == name)
    check_arguments(name, getattr(flash_attn_4, name), parameters_of(theirs))
