"""The documentation as a site: it holds together, has the public names, and mkdocs takes it without a warning."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import site_source as site  # noqa: E402


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "source"
    site.assemble(folder)
    return folder


def test_every_link_leads_somewhere(source):
    assert site.broken_links(source) == []


def test_a_broken_link_is_found(source):
    page = source / "docs" / "broken.md"
    page.write_text("# A page\n\n[there](python.md) [nowhere](absent.md)\n\n    [code](is_no_link.md)\n")
    assert site.broken_links(source) == ["docs/broken.md: absent.md"]
    page.unlink()


def test_every_page_is_in_the_navigation_or_linked(source):
    linked = (ROOT / "mkdocs.yml").read_text() + "".join(page.read_text() for page in source.rglob("*.md"))
    lost = [page.name for page in source.rglob("*.md") if page.name not in linked]
    assert lost == []


def test_the_reference_has_the_public_names(source):
    page = (source / "api" / "python.md").read_text()
    for module in ("", ".masks", ".sparse", ".parallel", ".flash_mla"):
        package = importlib.import_module("flash_attention" + module)
        for name in package.__all__:
            if name != "jax" and callable(getattr(package, name, None)):
                assert f"### flash_attention{module}.{name} {{" in page, name
    assert "flash_attention_problem_init_sized" in (source / "api" / "c.md").read_text()
    assert "typical_gpu" in (source / "api" / "cpp.md").read_text()


@pytest.mark.long_tail
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no mkdocs here; `make docs` installs it")
def test_mkdocs_builds_it_without_a_warning():
    done = subprocess.run([sys.executable, "tools/site_source.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "build" / "site" / "html" / "index.html").exists()
