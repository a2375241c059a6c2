"""Reference pages from the package's docstrings and from the comments of the public headers."""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "include" / "flash_attention"
MODULES = (
    "flash_attention",
    "flash_attention.masks",
    "flash_attention.sparse",
    "flash_attention.parallel",
    "flash_attention.flash_attn",
    "flash_attention.flash_attn_3",
    "flash_attention.flash_attn_4",
    "flash_attention.flash_mla",
    "flash_attention.flashinfer",
    "flash_attention.xformers",
)


def shown(value: object) -> inspect.Signature:
    """What it takes: `wrong` collects keywords that there are not."""
    signature = inspect.signature(value)
    return signature.replace(parameters=[each for name, each in signature.parameters.items() if name != "wrong"])


def signature_of(value: object) -> str:
    try:
        return str(shown(value))
    except (TypeError, ValueError):
        return "(...)"


def call_of(name: str, value: object) -> str:
    """How it is called: on one line if that fits, otherwise an argument a line."""
    text = f"{name}{signature_of(value)}"
    if len(text) <= 88 or not callable(value):
        return text
    try:
        signature = shown(value)
    except (TypeError, ValueError):
        return text
    lines, keywords = [], False
    for parameter in signature.parameters.values():
        keywords |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            lines.append("*,")
            keywords = True
        lines.append(f"{parameter},")
    ending = (
        ""
        if signature.return_annotation is signature.empty
        else f" -> {inspect.formatannotation(signature.return_annotation)}"
    )
    return "\n".join([f"{name}(", *(f"    {line}" for line in lines), f"){ending}"])


def is_code(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def as_markdown(docstring: str) -> list[str]:
    """Paragraphs as they are; what is indented is code of Python, or else shown as it stands."""
    lines = []
    for block in re.split(r"\n{2,}(?=\S)|(?<=\S)\n\n(?=    )", docstring):
        if block.startswith("    "):
            text = textwrap.dedent(block).rstrip()
            lines += [f"```{'python' if is_code(text) else 'text'}", text, "```", ""]
        else:
            lines += [re.sub(r"([*<|])", r"\\\1", block), ""]
    return lines


def python_module(name: str) -> list[str]:
    """A heading for each public function and class, with signature and docstring."""
    module = importlib.import_module(name)
    lines = [f"## {name}", "", *as_markdown(inspect.getdoc(module) or "")]
    for entry in sorted(getattr(module, "__all__", [])):
        if entry == "jax":  # imports JAX
            continue
        value = getattr(module, entry)
        if not callable(value):
            continue
        lines += [f"### {name}.{entry} {{ data-toc-label='{entry}' }}", "", "```python", call_of(entry, value), "```", ""]
        lines += as_markdown(inspect.getdoc(value) or "")
    return lines


def python_page() -> str:
    lines = [
        "# Python reference",
        "",
        "Every public function, from its docstring. [Python, explained](../docs/python.md) begins with examples.",
        "",
    ]
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
