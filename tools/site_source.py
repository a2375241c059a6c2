"""Puts the documentation together in build/site/source, checks its links, and builds the site; `make docs` calls it.

The tree of the repository is kept, so that links between pages hold as they are; files that pages link to come along.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import api_reference
import notebook

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "site" / "source"
NOTEBOOKS = ("examples/emulator.ipynb",)  # pages of the site
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^(```.*?^```|    .*?$)", re.DOTALL | re.MULTILINE)


def write_index(folder: Path) -> None:
    """A page that lists what is in a folder of the site: pages by their titles, other files by their names."""
    rows = []
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name != "index.md"):
        title = re.search(r"^# (.*)$", path.read_text(), re.MULTILINE) if path.suffix == ".md" else None
        rows.append(f"- [{title[1] if title else path.name}]({path.name})")
    (folder / "index.md").write_text(f"# {folder.name.capitalize()}\n\n" + "\n".join(rows) + "\n")


def bring(page: Path, source: Path) -> None:
    """Copies what a page links to and the site does not have; a link to a folder becomes one to its list of pages."""
    text = page.read_text()

    def follow(match: re.Match) -> str:
        target = (page.parent / match[2]).resolve()
        if not target.is_relative_to(source):
            return match[0]
        original = ROOT / target.relative_to(source)
        if original.is_dir():
            if not target.exists():
                shutil.copytree(original, target, ignore=shutil.ignore_patterns("__pycache__"))
            page_of_folder = "README.md" if (original / "README.md").exists() else "index.md"
            if page_of_folder == "index.md":
                write_index(target)
            return f"{match[1]}{match[2].rstrip('/')}/{page_of_folder}{match[3]}"
        if not target.exists() and original.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(original, target)
        return match[0]

    page.write_text(LINK.sub(follow, text.replace(".ipynb)", ".md)")))


def assemble(source: Path) -> None:
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source / "docs")
    for name in TOP:
        shutil.copy(ROOT / name, source / name)
    start = source / TOP[0]  # alone in its tab: nothing to navigate to
    start.write_text("---\nhide: [navigation]\n---\n\n" + start.read_text())
    for name in ("kernels", "lab"):
        write_index(source / "docs" / name)
    api_reference.write_pages(source / "api")
    for name in NOTEBOOKS:
        page = (source / name).with_suffix(".md")
        page.parent.mkdir(exist_ok=True)
        page.write_text(notebook.markdown(json.loads((ROOT / name).read_text())))
    for page in sorted(source.rglob("*.md")):
        bring(page, source)


def broken_links(source: Path) -> list[str]:
    """Links from page to page, or to a file, that lead nowhere. What is code on a page is no link."""
    broken = []
    for page in sorted(source.rglob("*.md")):
        for match in LINK.finditer(FENCE.sub("", page.read_text())):
            if not (page.parent / match[2]).exists():
                broken.append(f"{page.relative_to(source)}: {match[2]}")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources-only", action="store_true", help="put together and check, without mkdocs")
    arguments = parser.parse_args()
    assemble(SOURCE)
    if broken := broken_links(SOURCE):
        print("site: links that lead nowhere:\n  " + "\n  ".join(broken), file=sys.stderr)
        return 1
    if arguments.sources_only:
        return 0
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # about a version of mkdocs that is not used here
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"], cwd=ROOT, env=quiet)
    if done.returncode == 0:
        print("site: build/site/html/index.html; with the search: python3 -m http.server -d build/site/html")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
