"""Reference pages from the package's docstrings and from the comments of the public headers."""

import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "include" / "flash_attention"
MODULES = (
    "flash_attention",
    "flash_attention.flash_attn",
    "flash_attention.flash_attn_3",
    "flash_attention.flashinfer",
    "flash_attention.parallel",
)


def signature_of(value: object) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"


def python_module(name: str) -> list[str]:
    """A heading for each public function and class, with signature and docstring."""
    module = importlib.import_module(name)
    lines = [f"## {name}", "", "```text", inspect.getdoc(module) or "", "```", ""]
    for entry in sorted(getattr(module, "__all__", [])):
        if entry == "jax":  # imports JAX
            continue
        value = getattr(module, entry)
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        text = inspect.getdoc(value) or ""
        lines += [f"### {name}.{entry}", "", "```python", f"{entry}{signature_of(value)}", "```", ""]
        lines += ["```text", text, "```", ""] if text else []
    return lines


def python_page() -> str:
    lines = ["# Python reference", "", "Written from the docstrings; [python.md](../docs/python.md) explains.", ""]
    for name in MODULES:
        lines += python_module(name)
    return "\n".join(lines)


def without_guards(text: str) -> str:
    """A header from its first comment or declaration on, without what only the compiler needs."""
    kept = [line for line in text.splitlines() if not re.match(r"\s*#\s*(pragma|include|ifndef|define|ifdef|endif)", line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def header_page(title: str, names: list[str]) -> str:
    lines = [f"# {title} reference", "", "Written from the headers in `include/flash_attention/`.", ""]
    for name in names:
        language = "c" if name == "c_api.h" else "cpp"
        lines += [f"## {name}", "", f"```{language}", without_guards((HEADERS / name).read_text()), "```", ""]
    return "\n".join(lines)


def write_pages(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    headers = sorted(path.name for path in HEADERS.glob("*.h") if path.name not in ("c_api.h", "export.h"))
    (folder / "python.md").write_text(python_page())
    (folder / "cpp.md").write_text(header_page("C++", headers))
    (folder / "c.md").write_text(header_page("C", ["c_api.h"]))
