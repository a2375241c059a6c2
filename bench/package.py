"""Makes the flash_attention of this source tree importable.

Where its extension is not built, the parts in pure Python (Triton kernels, report) still import, and `unavailable` says
why our own kernels are left out.
"""

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

unavailable = ""
try:
    import flash_attention

    unavailable = "" if hasattr(flash_attention, "attention") else "the extension of flash_attention is not built"
except ImportError as error:
    unavailable = f"flash_attention does not import: {error}"
    flash_attention = types.ModuleType("flash_attention")
    flash_attention.__path__ = [str(ROOT / "python" / "flash_attention")]
    sys.modules["flash_attention"] = flash_attention
