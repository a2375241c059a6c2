"""Makes flash_attention importable: the installed package, or the one of this source tree with the extension from build/.

Where there is no extension, the parts in pure Python (Triton kernels) still import, and `unavailable` says why our
own kernels are left out.
"""

import importlib.util
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
unavailable = ""


def load_built_extension():
    """The newest build/*/python/_core*.so, as flash_attention._core."""
    built = sorted(ROOT.glob("build/*/python/_core*.so"), key=lambda path: path.stat().st_mtime)
    if built:
        spec = importlib.util.spec_from_file_location("flash_attention._core", built[-1])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["flash_attention._core"] = module


if importlib.util.find_spec("flash_attention") is None:
    sys.path.insert(0, str(ROOT / "python"))
    load_built_extension()
try:
    import flash_attention
except ImportError as error:
    unavailable = f"flash_attention does not import: {error}"
    flash_attention = types.ModuleType("flash_attention")
    flash_attention.__path__ = [str(ROOT / "python" / "flash_attention")]
    sys.modules["flash_attention"] = flash_attention
