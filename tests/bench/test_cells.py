"""Ours over the best other, cell by cell, and the list of cells in which another is faster."""

import pytest

pytest.importorskip("torch")
import presets
import report
from cases import Case
from report import cells, markdown

SOFTCAP, MASKED = Case(2, 8192, 16, 128, causal=True, softcap=30.0), Case(2, 8192, 16, 128, masked="random")


def row(case, name, which, ms):
    tflops = case.flops(which) / ms / 1e9
    return {"case": case.as_json(), "baseline": name, "pass": which, "ms": ms, "p10": ms, "p90": ms, "samples": 9,
            "tflops": tflops}  # fmt: skip


@pytest.fixture
def files(head):
    options = [row(SOFTCAP, "ours", "forward", 2.0), row(SOFTCAP, "ours", "backward", 8.0)]
    options += [row(MASKED, "ours", "forward", 3.0), row(MASKED, "sdpa_cudnn", "forward", 6.0)]
    options += [row(MASKED, "sdpa_efficient", "forward", 9.0), row(MASKED, "triton", "forward", 1.0)]
    flex = [row(SOFTCAP, "flex", "forward", 5.0), row(SOFTCAP, "flex", "backward", 6.0)]
    small = Case(1, 512, 16, 128)
    small = [row(small, "ours", "forward", 0.01), row(small, "sdpa_cudnn", "forward", 0.012)]
    sweep = Case(32, 512, 16, 128)
    sweep = [row(sweep, "ours", "forward", 1.0), row(sweep, "sdpa_cudnn", "forward", 1.5)]
    for each in sweep:  # of an older file
        each["case"] = {n: v for n, v in each["case"].items() if n not in ("softcap", "alibi", "bias", "head_dim_v")}
    times = {"ours": {"ms": 0.03}, "page 16": {"ms": 0.02}, "cudnn": {"ms": 0.024}, "flash-attn": {"ms": 0.06}}
    decode = [
        {"label": "1 x 32/8 x 1024", "pass": "forward", "times": times, "peers": ["cudnn", "flash-attn"], "gbs": 900.0}
    ]
    decode.append({"label": "1 x 8/1 x 64", "pass": "forward", "reason": "AssertionError: it differs"})
    latent = {"ours": {"ms": 0.2, "tflops": 500.0}, "ours, fp8": {"ms": 0.15, "tflops": 666.0}}
    mla = [{"label": "128x16x4096, tokens 1", "pass": "forward", "times": latent, "peers": []}]
    named = {"options": options, "options_flex": flex, "small": small, "seq_sweep": sweep}
    found = [report.Results("speed", {**head, "listed": name != "seq_sweep"}, rows, name) for name, rows in named.items()]
    return [*found, report.Results("times", head, decode, "decode"), report.Results("times", head, mla, "mla")]


def test_the_best_of_the_others(files):
    found = {(each.stage, each.title(), each.which): each for each in cells.cells(files)}
    forward = found["options", SOFTCAP.label(), "forward"]
    assert (forward.other, forward.ratio) == ("flex", 2.5), (
        "a file of FlexAttention alone stands against ours of the others"
    )
    masked = found["options", MASKED.label(), "forward"]
    assert (masked.other, masked.ratio) == ("sdpa_cudnn", 2.0), "the fastest of other libraries; Triton's is ours"
    decode = found["decode", "1 x 32/8 x 1024", "forward"]
    assert (decode.other, decode.ratio, decode.more) == ("cudnn", pytest.approx(0.8), "900 GB/s")
    assert found["mla", "128x16x4096, tokens 1", "forward"].ratio is None
    assert found["mla", "128x16x4096, tokens 1 (ours, fp8)", "forward"].more == "666 TFLOP/s"
    assert len(found) == 8 and not any(stage == "options_flex" for stage, _, _ in found)


def test_only_the_same_job_is_compared(head):
    case = Case(2, 8192, 16, 128)
    names = {"ours": 2.0, "ours_fp8": 1.0, "ours_tf32": 1.5, "sdpa_cudnn": 3.0, "flash_attn_3_fp8": 1.2}
    rows = [row(case, name, "forward", ms) for name, ms in names.items()]
    found = {cell.name: (cell.other, cell.ratio) for cell in cells.cells([report.Results("speed", head, rows)])}
    assert found == {"ours": ("sdpa_cudnn", 1.5), "ours_fp8": ("flash_attn_3_fp8", 1.2), "ours_tf32": ("", None)}


def test_an_option_is_set_beside_the_plain_problem(head):
    window = Case(2, 8192, 16, 128, causal=True, window=1024)
    plain = Case(2, 8192, 16, 128, causal=True)
    rows = [row(plain, "ours", "forward", 2.0), row(window, "ours", "forward", 2.0), row(MASKED, "ours", "forward", 2.0)]
    first, second, third = cells.cells([report.Results("speed", head, rows, "options")])
    part = window.flops("forward") / plain.flops("forward")
    assert second.more.endswith(f" TFLOP/s, {part:.2f} of plain") and "plain" not in first.more + third.more


def test_a_stage_is_summed_up(files):
    rows = {row[0]: row[1:] for row in cells.summary(cells.cells(files)).rows}
    least = SOFTCAP.label() + ", backward"
    assert rows["options"] == ["3", f"{(2.5 * 0.75 * 2.0) ** (1 / 3):.3f}", "0.750", least, "1", "0123456"]
    assert set(rows) == {"options", "small", "seq_sweep", "decode"}


def test_cells_under_one_are_listed_the_worst_first(files, tmp_path):
    table = cells.under_one(cells.cells(files))
    assert [(row[0], row[2], row[5], row[6]) for row in table.rows] == [
        ("options", "backward", "flex", "0.750"),
        ("decode", "forward", "cudnn", "0.800"),
    ]
    faster = [f for f in files if f.name in ("small", "seq_sweep")]
    assert cells.under_one(cells.cells(faster)).note == "There is none."
    report.write_html(files, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Cells under 1.0" in text and "Every cell of decode" in text and "AssertionError: it differs" in text


def test_a_list_has_a_table_and_no_chart_by_length(files, tmp_path):
    charts = dict(report.sections(files))["Speed"]
    assert [chart.series for chart in charts] == [
        {"ours": [pytest.approx(68.72, 1e-3)], "sdpa_cudnn": [pytest.approx(45.81, 1e-3)]}
    ]
    page = tmp_path / "results.md"
    page.write_text(f"{markdown.BEGIN}\n{markdown.END}\n")
    report.write_markdown(files, page)
    text = page.read_text()
    assert "### options\n" in text and "(2.50 x flex) |" in text
    assert "| 1 x 32/8 x 1024 | 900 GB/s (0.80 x cudnn) |" in text
    assert "| decode | 1 x 32/8 x 1024 | forward | 0.03 | 0.024 | cudnn | 0.800 |" in text


def test_both_measurements_of_a_cpu_are_cells(head):
    case = Case(1, 384, 8, 64, dtype="float32")
    rows = [
        row(case, "ours", "forward", 1.0) | {"interleaved_ms": 2.0},
        row(case, "sdpa", "forward", 3.0) | {"interleaved_ms": 1.5},
    ]
    first, second = cells.cells([report.Results("speed", head, rows, "forward")])
    assert (first.which, first.ratio) == ("forward", 3.0)
    assert (second.which, second.ratio) == ("forward, between matrix products", 0.75)
    for each in rows:
        each["interleaved_ms"] = each["ms"]
    (only,) = cells.cells([report.Results("speed", head, rows, "interleaved_forward")])
    assert (only.which, only.ratio) == ("forward, between matrix products", 3.0)


def test_every_list_of_the_record_says_that_it_is_one():
    """Shapes that differ in more than the length would hide each other in a chart by length."""
    assert {f.__name__ for f in presets.LISTS} == {"options", "small", "cross", "wide", "fp8", "fp32"}
    small = presets.small()
    assert len(small) == len(set(small)) == 20 and {case.seq for case in small} >= {77, 197, 577, 512, 1024, 2048}
    kinds = {(c.head_dim, c.causal, c.softcap, c.alibi, c.bias, c.dropout_p, c.window, c.masked) for c in presets.options()}
    assert len(kinds) == len(presets.options()) == 30


@pytest.mark.parametrize(
    "peers, other, ratio", [({"sdpa": 24.0}, "sdpa", 1.1), ({"sdpa": 24.0, "sdpa_cudnn": 23.0}, "sdpa_cudnn", 1.15)]
)
def test_a_model_stands_against_its_fastest_attention(head, peers, other, ratio):
    case = {"model": "gpt2", "batch": 16, "seq": 1024, "dtype": "bfloat16", "layers": 8, "autocast": True}
    rows = [{"case": case, "baseline": "ours", "pass": "training", "ms": 20.0, "against_sdpa": 1.1}]
    rows += [
        {"case": case, "baseline": name, "pass": "training", "ms": ms, "against_sdpa": 1.0} for name, ms in peers.items()
    ]
    (found,) = cells.cells([report.Results("models", head, rows, "models")])
    assert (found.other, found.ratio) == (other, pytest.approx(ratio))
    assert found.title() == "gpt2 of 8 layers, B16 L1024, bfloat16 by autocast"
