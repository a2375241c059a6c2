"""`import flash_attn` for programs that cannot be changed: on request, the name refers to this package."""

import importlib.metadata
import sys
from importlib import import_module

_HERE = "flash_attention.compat.flash_attn"
_MODULES = ("", ".flash_attn_interface", ".bert_padding", ".layers", ".layers.rotary", ".modules", ".modules.mha")


def register_flash_attn() -> None:
    """Makes `import flash_attn`, `from flash_attn.bert_padding import ...` and so on refer to flash_attention.flash_attn.

        register_flash_attn()
        from flash_attn import flash_attn_func
        unregister_flash_attn()

    Call it before anything imports flash_attn. An installed flash-attn is hidden until unregister_flash_attn(). Programs
    that look for the distribution flash-attn (importlib.metadata) find the version whose names are here. transformers'
    is_flash_attn_2_available() is then true if there is a GPU.
    """
    there = sys.modules.get("flash_attn")
    if there is not None and there.__name__ != _HERE:
        origin = getattr(there, "__file__", None)
        raise RuntimeError(f"flash_attn: is already imported from {origin}; call register_flash_attn() before that")
    for module in _MODULES:
        sys.modules["flash_attn" + module] = import_module(_HERE + module)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _forget_answers()


def unregister_flash_attn() -> None:
    """Gives the name flash_attn back.

    For example:

        register_flash_attn()
        unregister_flash_attn()
    """
    for module in _MODULES:
        known = sys.modules.get("flash_attn" + module)
        if known is not None and known.__name__.startswith(_HERE):
            del sys.modules["flash_attn" + module]
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    _forget_answers()


class _Distribution(importlib.metadata.Distribution):
    """The distribution flash-attn for importlib.metadata."""

    def read_text(self, filename):
        from flash_attention.compat.flash_attn import __version__

        files = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {__version__}\n",
            "top_level.txt": "flash_attn\n",
        }
        return files.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(f"{path}: flash-attn is not installed; register_flash_attn() stands for it")


class _Finder:
    """Finds distributions only."""

    def find_spec(self, name, path=None, target=None):
        return None

    def find_distributions(self, context=None):
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("_", "-") == "flash-attn":
            yield _Distribution()


_FINDER = _Finder()


def _forget_answers():
    """transformers tests once and caches the answer."""
    utils = sys.modules.get("transformers.utils.import_utils")
    for name in ("_package_distribution_mapping", "is_flash_attn_2_available"):
        forget = getattr(getattr(utils, name, None), "cache_clear", None)
        if forget is not None:
            forget()
