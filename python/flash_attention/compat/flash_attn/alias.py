"""`import flash_attn` for programs that cannot be changed: the name stands for this package, on request."""

import sys
from importlib import import_module

_HERE = "flash_attention.compat.flash_attn"
_MODULES = ("", ".flash_attn_interface", ".bert_padding", ".layers", ".layers.rotary")


def register_flash_attn() -> None:
    """Makes `import flash_attn`, `from flash_attn.bert_padding import ...` and their kin mean flash_attention.flash_attn.

    Call it before anything imports flash_attn. An installed flash-attn is hidden until unregister_flash_attn().
    """
    there = sys.modules.get("flash_attn")
    if there is not None and there.__name__ != _HERE:
        origin = getattr(there, "__file__", None)
        raise RuntimeError(f"flash_attn: is already imported from {origin}; call register_flash_attn() before that")
    for module in _MODULES:
        sys.modules["flash_attn" + module] = import_module(_HERE + module)


def unregister_flash_attn() -> None:
    """Gives the name flash_attn back."""
    for module in _MODULES:
        known = sys.modules.get("flash_attn" + module)
        if known is not None and known.__name__.startswith(_HERE):
            del sys.modules["flash_attn" + module]
