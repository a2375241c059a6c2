"""The documentation as a reader sees it: every page in Chromium, as wide as a screen and as narrow as a phone."""

import functools
import http.server
import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "build" / "site" / "html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [
    *(name for name in ("material", "playwright") if importlib.util.find_spec(name) is None),
    *([] if CHROMIUM else ["chromium"]),
]

pytestmark = [
    pytest.mark.long_tail,
    pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}; `make docs` installs the packages"),
]
WIDTHS = {"screen": (1280, 900), "phone": (390, 844)}
# Elements that stick out to the right and are not in a box that scrolls.
STICKING_OUT = """() => {
  const boxes = ['auto', 'scroll', 'hidden'];
  const scrolls = e => e && (boxes.includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  return [...document.querySelectorAll('.md-content *')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && e.getClientRects().length && !scrolls(e))
    .map(e => e.tagName + ': ' + e.textContent.trim().slice(0, 60));
}"""


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    done = subprocess.run([sys.executable, "tools/site_source.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=HTML)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    page = browser.new_page()
    page.requested = []
    page.on("request", lambda request: page.requested.append(request.url))
    yield page
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_and_fetches_nothing_elsewhere(page, address, width):
    page.set_viewport_size(dict(zip(("width", "height"), WIDTHS[width], strict=True)))
    wrong, pages = {}, sorted(path for path in HTML.rglob("*.html") if "bench" not in path.parts)
    for path in pages:
        name = path.relative_to(HTML).as_posix()
        page.goto(f"{address}/{name}", wait_until="load")
        if page.evaluate("document.documentElement.scrollWidth > innerWidth") or page.evaluate(STICKING_OUT):
            wrong[name] = page.evaluate(STICKING_OUT)[:3]
    assert len(pages) > 40 and wrong == {}
    assert [url for url in page.requested if not url.startswith((address, "data:", "blob:"))] == []


def test_the_search_finds_a_function(page, address):
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{address}/index.html", wait_until="load")
    page.click("label.md-search__icon, input.md-search__input")
    page.fill("input.md-search__input", "attention_over_cache")
    page.wait_for_selector(".md-search-result__link", timeout=120000)
    links = page.eval_on_selector_all(".md-search-result__link", "found => found.map(link => link.href)")
    assert any("python" in link for link in links), links


def test_results_begin_with_the_machine(page, address):
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{address}/docs/results.html", wait_until="load")
    assert "H200" in page.inner_text(".md-content p >> nth=0")
    picture = page.locator(".md-content img").first.bounding_box()
    assert picture["y"] < 900 and picture["width"] > 400
