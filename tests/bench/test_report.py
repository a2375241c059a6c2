"""The report, as text and as a browser shows it."""

import itertools
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("torch")
cases = pytest.importorskip("cases")
import presets  # noqa: E402
import report  # noqa: E402
from flash_attention.commands import report as verb  # noqa: E402
from report import charts, markdown, panels, svg  # noqa: E402

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


def speed_row(seq, name, which, tflops, causal=False, noisy=False):
    return case_row(cases.Case(16384 // seq, seq, 16, 128, causal=causal), name, which, tflops, noisy)


def case_row(case, name, which, tflops, noisy=False):
    ms = case.flops(which) / tflops / 1e9
    return {
        "case": case.as_json(), "baseline": name, "pass": which, "ms": ms, "p10": ms, "p90": ms, "samples": 9,
        "tflops": tflops, "intensity": case.flops(which) / case.bytes(which), "noisy": noisy,
    }  # fmt: skip


@pytest.fixture
def files(head):
    speeds = {"ours": 700.0, "sdpa_cudnn": 600.0, "standard": 50.0, "ladder/00_naive": 1.5}
    speed = [
        speed_row(s, n, w, t, c)
        for s in (512, 4096)
        for c in (False, True)
        for w in ("forward", "backward")
        for n, t in speeds.items()
    ]
    speed.append(speed_row(8192, "ours", "forward", 701.0, noisy=True))
    speed.append({"case": speed[0]["case"], "baseline": "flex", "pass": "forward", "reason": "a <reason> & more"})
    memory = [
        {"case": cases.Case(1, s, 16, 128).as_json(), "baseline": n, "pass": "both", "peak_bytes": b * s, "extra_bytes": b}
        for s in (1024, 4096) for n, b in (("ours", 10**5), ("standard", 10**7))
    ]  # fmt: skip
    search = {"axis": "batch", "budget_gb": 16.0, "case": cases.Case(1, 4096, 16, 64, causal=True).as_json()}
    capacity = [
        {"search": search, "baseline": n, "largest": v, "at_limit": False} for n, v in (("ours", 240), ("standard", 8))
    ]
    wrong = {"rms": 2e-3, "worst": 1e-2}
    accuracy = [
        {"case": cases.Case(1, s, 2, 64).as_json(), "baseline": n, "out": wrong, "dq": wrong}
        for s in (512, 2048) for n in ("ours", "sdpa_math")
    ]  # fmt: skip
    models = [
        {"case": {"model": "gpt2", "batch": 1, "seq": s, "dtype": "float32"}, "baseline": n, "pass": "training", "ms": ms,
         "p10": ms, "p90": ms, "samples": 5, **({"against_sdpa": 1.31 if n == "ours" else 1.0} if s == 128 else {})}
        for s in (2048, 128) for n, ms in (("ours", s / 10.0), ("sdpa", s / 8.0))
    ]  # fmt: skip
    kinds = {"speed": speed, "memory": memory, "capacity": capacity, "accuracy": accuracy, "models": models}
    return [report.Results(kind, head, rows) for kind, rows in kinds.items()]


@pytest.fixture
def paths(files, tmp_path):
    for results in files:
        results.save(tmp_path / f"{results.kind}.json")
    return [tmp_path / f"{results.kind}.json" for results in files]


def run(*arguments):
    import argparse

    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args([str(a) for a in arguments]))


def test_page_is_self_contained_and_complete(paths, tmp_path):
    page = tmp_path / "page.html"
    assert run(*paths, "--output", page) == 0
    text = page.read_text()
    assert "<script" not in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    for heading in (
        "Speed",
        "Speed-up",
        "Ladder",
        "Models",
        "Memory",
        "What fits",
        "Roofline",
        "Accuracy",
        "Left out",
        "Environment",
    ):
        assert f"<h2>{heading}</h2>" in text
    assert text.count("<svg") == text.count("<details>") and "a &lt;reason&gt; &amp; more" in text
    assert "prefers-color-scheme:dark" in text
    assert "0123456789ab" in text and "701~" in text


def test_every_chart_is_valid_svg(files):
    drawn = [chart for _, held in report.sections(files) for chart in held if isinstance(chart, charts.Chart)]
    assert {chart.kind for chart in drawn} == {"bars", "lines", "heat", "points"}
    for chart in drawn:
        root = ElementTree.fromstring(svg.draw(chart))
        width, height = (float(v) for v in root.get("viewBox").split()[2:])
        for element in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, w, h = (float(element.get(n)) for n in ("x", "y", "width", "height"))
            assert x >= 0 and x + w <= width + 1 and y >= 0 and y + h <= height + 1 and h >= 0


@pytest.mark.skipif(shutil.which("rsvg-convert") is None, reason="librsvg's rsvg-convert is not installed")
def test_any_viewer_shows_colours_and_the_title(files, tmp_path):
    """librsvg knows no CSS variables."""
    image = pytest.importorskip("PIL.Image")
    for _, held in report.sections(files):
        for chart in held:
            if not isinstance(chart, charts.Chart):
                continue
            (drawing, *_) = report.write_charts([chart], tmp_path)
            picture = tmp_path / "picture.png"
            subprocess.run(["rsvg-convert", "--output", picture, drawing], check=True)
            count = {colour: number for number, colour in image.open(picture).convert("RGB").getcolors(1 << 24)}
            wanted = {fill for fill in re.findall(r'fill="#(\w{6})"', drawing.read_text()) if fill != svg.INK[0][1:]}
            seen = {fill for fill in wanted if tuple(int(fill[i : i + 2], 16) for i in (0, 2, 4)) in count}
            assert len(count) > 2 and (chart.kind == "heat" or seen == wanted), chart.name
            assert image.open(picture).convert("L").crop((0, 0, 860, 26)).getextrema()[0] < 100, "no title"


def test_series_of_a_chart_have_different_colours():
    names = ["NVLink 4 + NDR", "NVLink 5 + MDR", "N 4VLink + NDR", "ours", "sdpa_cudnn"]
    found = svg.colours(names)  # the first and the third have the same letters
    assert len(set(found.values())) == len(names) and list(found) != names
    assert found["ours"] == svg.colours(["ours"])["ours"] and found["sdpa_cudnn"] == svg.ENTRIES.index("sdpa_cudnn")
    assert len(svg.colours([f"{n:02}_rung" for n in range(17)])) == 17  # more than there are colours


@pytest.mark.parametrize("words", [3, 30])
def test_a_title_is_whole(words):
    title = " ".join(["eleven char"] * words)
    drawn = ElementTree.fromstring(svg.draw(charts.Chart("a", title, "bars", "", "", ["x"], {"ours": [1.0]})))
    lines = [text.text for text in drawn.findall("{http://www.w3.org/2000/svg}text")]
    assert " ".join(lines) == title and max(map(len, lines)) <= 105


PICTURES = Path(__file__).resolve().parents[2] / "docs"
CHARTS = [path for path in sorted(PICTURES.rglob("*.svg")) if path.stem.startswith(("forward", "ladder", "parallel"))]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda path: path.stem)
def test_a_chart_of_the_documents_has_a_png_beside_it(chart):
    assert chart.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(shutil.which("rsvg-convert") is None, reason="librsvg's rsvg-convert is not installed")
@pytest.mark.parametrize("drawing", sorted(PICTURES.rglob("*.svg")), ids=lambda path: path.stem)
def test_any_viewer_shows_a_picture_of_the_documents(drawing, tmp_path):
    image = pytest.importorskip("PIL.Image")
    subprocess.run(["rsvg-convert", "--output", tmp_path / "picture.png", drawing], check=True)
    assert len(image.open(tmp_path / "picture.png").convert("RGB").getcolors(1 << 24)) > 2
    assert drawing not in CHARTS or "prefers-color-scheme:dark" in drawing.read_text()


def test_bars_are_as_high_as_their_values(files):
    chart = panels.speed_charts(files[0].measured())[0]
    heights = [float(h) for h in re.findall(r'height="([\d.]+)" fill="#d1495b" class="f0">', svg.draw(chart))]
    values = chart.series["ours"]
    assert heights[1] / heights[0] == pytest.approx(values[1] / values[0], rel=0.01)


def test_speedups_are_ratios_of_times(files):
    heat = {chart.name: chart for chart in panels.speedup_charts(files[0].measured())}
    for values in heat["speedup sdpa_cudnn"].series.values():
        assert [v for v in values if v] == [pytest.approx(700 / 600)] * 2
    assert "speedup the fastest other" in heat and "speedup sdpa_flash" not in heat


def test_what_was_timed_between_matmuls_has_charts_of_its_own(files):
    rows = [row | {"interleaved_ms": 2 * row["ms"]} for row in files[0].measured()]
    next(row for row in rows if row["baseline"] == "sdpa_cudnn")["interleaved_ms"] *= 3
    heat = {chart.name: chart for chart in panels.speedup_charts(rows)}
    alone, between = (heat[f"speedup sdpa_cudnn{where}"] for where in ("", ", between matrix products"))
    ratios = [b / a for name in alone.series for a, b in zip(alone.series[name], between.series[name], strict=True) if a]
    assert sorted(ratios)[-1] == pytest.approx(3) and sorted(ratios)[:-1] == [pytest.approx(1)] * (len(ratios) - 1)
    assert between.title.endswith("over sdpa_cudnn, between matrix products")


def test_rungs_stand_in_their_own_charts(files):
    rows = files[0].measured()
    assert all("ladder/00_naive" not in chart.series for chart in panels.speed_charts(rows))
    for chart in panels.ladder_charts(rows):
        assert chart.x == ["00_naive", "standard", "ours"] and chart.series == {"TFLOP/s": [1.5, 50.0, 700.0]}


def test_the_ladder_as_a_staircase(tmp_path):
    """A bar a rung, in their order, where most of them were measured; a logarithmic axis."""
    speeds = {"ladder/00_standard": 0.9, "ladder/02_tiles": 6.5, "ladder/10_sm80": 330.0, "ours": 700.0}
    rows = [speed_row(4096, name, "forward", value, False) for name, value in reversed(speeds.items())]
    rows += [
        speed_row(8192, "ladder/00_standard", "forward", 1.0, False),
        speed_row(4096, "ladder/b0", "backward", 2.0, False),
    ]
    (chart,) = panels.ladder_staircase(rows)
    assert chart.x == ["00", "02", "10"]
    assert chart.series == {"ours": [0.9, 6.5, 330.0]}
    drawn = svg.draw(chart)
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)" [^>]*><title>', drawn)]
    steps = [b - a for a, b in itertools.pairwise(heights)]
    assert steps[1] / steps[0] == pytest.approx(math.log(330.0 / 6.5) / math.log(6.5 / 0.9), rel=0.01)
    assert {path.suffix for path in report.write_charts([chart], tmp_path)} == {".svg", ".png"}
    assert panels.ladder_staircase([row for row in rows if row["baseline"] == "ours"]) == []


def test_the_ladder_by_length():
    def row(rung, heads, seq, tflops):
        case = {"batch": 1, "seq": seq, "heads": heads, "head_dim": 128, "heads_kv": heads, "causal": True, "window": 0}
        case |= {"dtype": "bfloat16", "dropout_p": 0.0, "lengths": []}
        return {"case": case, "baseline": f"ladder/{rung}", "pass": "forward", "tflops": tflops}

    rows = [row("00_naive", 96, 512, 1.0), row("00_naive", 96, 1024, 2.0), row("06_mma", 96, 512, 100.0)]
    (chart,) = panels.ladder_scaling_charts([*rows, row("06_mma", 16, 512, 7.0)])
    assert chart.x == [512, 1024] and chart.series == {"00_naive": [1.0, 2.0], "06_mma": [100.0, None]}
    assert "96 heads" in chart.title and "<svg" in svg.draw(chart)


def test_capacity_is_compared_with_standard_attention(files):
    small = {"axis": "batch", "budget_gb": 16.0, "case": cases.Case(1, 1024, 8, 64, causal=True).as_json()}
    other = {"search": small, "baseline": "ours", "largest": 1500, "at_limit": False}
    table, second = panels.capacity_tables([*files[2].rows, other])
    assert second.rows == [["ours", "1500", "-"]] and second.name != table.name
    assert table.rows == [["ours", "240", "30.0 x"], ["standard", "8", "1.0 x"]]
    assert "16 GB" in table.title


def test_models_are_compared_by_tokens(files):
    (table,) = panels.model_tables(files[4].rows)
    assert table.rows == [["128", "12.8", "16", "1.31 x"], ["2048", "205", "256", "1.25 x"]]
    assert "gpt2-like model, training, float32" in table.title


def test_models_beside_each_backend():
    case = {"model": "gpt2", "batch": 16, "seq": 1024, "dtype": "bfloat16", "layers": 8, "autocast": True}
    times = {"ours": (22.0, 1.05), "sdpa": (23.1, 1.0), "sdpa_cudnn": (23.2, 0.99)}
    rows = [
        {"case": case, "baseline": name, "pass": "training", "ms": ms, "against_sdpa": ratio}
        for name, (ms, ratio) in times.items()
    ]
    (table,) = panels.model_tables(rows)
    assert table.header == ["tokens", "ours", "sdpa", "sdpa_cudnn", "speed-up over sdpa"]
    assert table.rows == [["1024", "22", "23.1", "23.2", "1.05 x"]]
    assert table.title == "A gpt2-like model of 8 layers, training, bfloat16 by autocast: milliseconds a step"


@pytest.mark.parametrize(
    "value, text", [(None, "-"), (4096, "4096"), (661.7, "662"), (12.34, "12.3"), (1.5e-7, "1.50e-07"), (0.0, "0")]
)
def test_numbers_as_people_read_them(value, text):
    assert charts.cell(value) == text


def test_presets_side_by_side(head, tmp_path):
    """The files of a whole record: no preset's rows hide another's."""
    value, paths = 100.0, []
    expected = {}
    for name in ("gpt3", "gqa", "packed", "paper", "seq_sweep"):
        rows = []
        for case in presets.preset(name):
            for which in ("forward", "backward"):
                for baseline in ("ours", "sdpa_cudnn", "flash_attn"):
                    value += 1.0
                    rows.append(case_row(case, baseline, which, value))
                    expected[str(case.as_json()), baseline, which] = value  # of a case in two presets the later one's
        report.Results("speed", head, rows).save(tmp_path / f"{name}.json")
        paths.append(tmp_path / f"{name}.json")
    charts = panels.speed_charts([row for path in paths for row in report.load(path).measured()])
    shown = sorted(number for chart in charts for series in chart.series.values() for number in series if number)
    assert shown == sorted(expected.values())
    readme = tmp_path / "README.md"
    readme.write_text(f"{markdown.BEGIN}\n{markdown.END}\n")
    assert run(*paths, "--output", tmp_path / "page.html", "--readme", readme) == 0
    assert "head_dim 128, 32/8 heads, causal, bfloat16" in readme.read_text()


def test_readme_is_updated_between_its_markers(paths, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{markdown.BEGIN}\nold\n{markdown.END}\n\nrest\n")
    assert run(*paths, "--output", tmp_path / "a.html", "--readme", readme) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n") and text.endswith("\n\nrest\n") and "old" not in text
    assert "| head_dim 128, 16 heads, full, bfloat16 | 700 (1.17 x) | 700 (1.17 x) | 701~ |" in text
    assert "| ours | 700 | 700 | 701~ |" in text and "| a machine | 2026-01-01 | 0123456 |" in text
    assert run(*paths, "--output", tmp_path / "b.html", "--readme", readme) == 0
    assert readme.read_text() == text
    readme.write_text("no markers")
    assert run(*paths, "--output", tmp_path / "c.html", "--readme", readme) == 2
    assert readme.read_text() == "no markers" and "benchmark:begin" in capsys.readouterr().err


def test_a_packed_case_has_no_ratio_against_padded_peers(head):
    case = next(case for case in presets.preset("packed"))
    rows = [case_row(case, name, "forward", value) for name, value in (("ours", 8.0), ("sdpa_cudnn", 1.0))]
    (chart,) = panels.speed_charts(rows)
    (text,) = markdown.summaries([chart])
    assert "8" in text and " x)" not in text
    assert panels.speedup_charts(rows) == []
    rows.append(case_row(case, "flash_attn", "forward", 4.0))
    (text,) = markdown.summaries(panels.speed_charts(rows))
    assert "(2.00 x)" in text


def test_summary_has_a_row_for_each_shape_with_both_passes(head):
    rows = []
    for case in presets.preset("paper"):
        for which in ("forward", "backward"):
            for name, value in (("ours", 6.0), ("sdpa_cudnn", 4.0), ("sdpa_flash", 5.0)):
                rows.append(case_row(case, name, which, value))
    files = [report.Results("speed", head, rows)]
    text = markdown.summary(files, panels.speed_charts(rows))
    assert text.count("6 / 4 / 5 (1.20 x)") == 6 * 4
    first = next(line for line in text.splitlines() if line.startswith("| head_dim"))
    assert first.startswith("| head_dim 64, 32 heads")
    assert "ours / cuDNN / FlashAttention-2" in text and "~" not in text
    rows = [{**row, "noisy": row["pass"] == "backward"} for row in rows]
    text = markdown.summary(files, panels.speed_charts(rows))
    assert text.count("6~ / 4~ / 5~") == 6 * 2 and text.endswith("`~`: the samples spread by more than 5 %.")


def test_a_machine_is_named_once_with_its_commits(head):
    again = {**head, "commit": "fedcba9876"}
    files = [report.Results("speed", each, []) for each in (head, again, head)]
    device = head["machine"]["device"]
    assert markdown.measured_on(files) == f"{device}, commits {head['commit'][:7]}, fedcba9"


def test_images(paths, files, tmp_path):
    images = tmp_path / "images"
    assert run(*paths, "--output", tmp_path / "page.html", "--images", images) == 0
    found = sorted(images.glob("*.svg"))
    assert len(found) >= 8 and all(ElementTree.parse(path) for path in found)
    assert all(f">{files[0].head['machine']['device']}: " in path.read_text() for path in found)
    pytest.importorskip("matplotlib")
    for path in found:
        data = path.with_suffix(".png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000


def test_refusals(paths, tmp_path, capsys):
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert run(*paths, "--output", page) == 2
    assert page.read_text() == "mine" and "page.html: exists; allowed: --force" in capsys.readouterr().err
    assert run(*paths, "--output", page, "--force") == 0
    paths[0].write_text(paths[0].read_text()[:500])
    assert run(*paths, "--output", tmp_path / "other.html") == 2
    assert re.search(r"speed.json: line \d+: not JSON", capsys.readouterr().err)
    assert not (tmp_path / "other.html").exists()


def browse(page, tmp_path, *flags):
    """(picture of the page, console messages) from headless Chromium."""
    picture = tmp_path / "picture.png"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,2400",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}",
        *flags, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    image = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    return image, re.findall(r"CONSOLE.*", done.stderr)


def test_outside_of_a_checkout(paths, tmp_path, monkeypatch):
    """Wheels have the verb, but not what draws."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "report").is_dir()])
    for name in [name for name in sys.modules if name.split(".")[0] == "report"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match="bench/report is not here; call this in a checkout of the repository"):
        run(*paths)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_in_a_browser(files, tmp_path):
    page = tmp_path / "page.html"
    report.write_html(files, page)
    image, messages = browse(page, tmp_path)
    assert messages == []
    colours = dict((colour, count) for count, colour in image.getcolors(1 << 24))
    ours = tuple(int(svg.LIGHT[0][i : i + 2], 16) for i in (1, 3, 5))
    assert len(colours) > 100, "the picture is blank"
    assert colours.get(ours, 0) > 2000, "the bars of ours are not to be seen"
    assert image.getpixel((2, 2)) == (255, 255, 255)
    dark, messages = browse(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert messages == [] and sum(dark.getpixel((2, 2))) < 150

    page.write_text("<script>console.error('wrong')</script>")
    assert browse(page, tmp_path)[1], "a console message would not have been seen"


def test_every_rung_is_on_the_roofline(files, head):
    """Also those of a file of the command, which has neither ceilings nor intensities."""
    bare = {name: value for name, value in head.items() if name != "ceilings"}
    rows = [
        speed_row(4096, f"ladder/{name}", "forward", 3.0, causal) for name in ("01_x", "02_y") for causal in (False, True)
    ]
    known = [row.pop("intensity") for row in rows]
    (_, (people, ladder)) = next(section for section in report.sections([*files, report.Results("speed", bare, rows)])
                                 if section[0] == "Roofline")  # fmt: skip
    assert set(ladder.series) == {"00_naive", "01_x", "02_y"} and "ours" in people.series
    assert [point[0] for point in ladder.series["01_x"]] == pytest.approx(sorted(known[:2]))
    assert not any(name in people.series for name in ladder.series)
