"""The tables as Markdown, and their place in a document: all of them (`benchmark`), six rows (`summary`), or where and
when they were measured (`measured`)."""

import re
from pathlib import Path

from . import cells
from .charts import cell
from .panels import OURS, TAKE_PACKED, shape_of

PLACES = ("benchmark", "summary", "measured")
BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
SUMMARY_LENGTHS = (4096, 16384)
SUMMARY_PEERS = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "FlashAttention-2"}


def table(header, rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def render(files, sections):
    """Ours against the fastest other everywhere, every entry where most were measured, memory and what fits."""
    held = dict(sections)
    speed = held.get("Speed", [])
    widest = max((len(chart.series) for chart in speed), default=0)
    every = cells.cells(files)
    groups = {
        "Ours against the fastest other": overview(every),
        "TFLOP/s of ours by sequence length (times the fastest other)": summaries(speed),
        "Ours, problem by problem (times as fast as the best other)": listed(files, every),
        "Every library": charts_as_tables(chart for chart in speed if len(chart.series) >= widest - 1),
        "Memory": charts_as_tables([*held.get("Memory", []), *held.get("What fits", [])]),
    }
    parts = [part for title, found in groups.items() if found for part in (f"## {title}", *found)]
    return "\n\n".join([*parts, "## Sources", sources(files)])


def charts_as_tables(charts):
    def unit(chart):
        return f" ({chart.y_label})" if hasattr(chart, "y_label") else ""

    return [f"### {chart.title}{unit(chart)}\n\n{table(*chart.table())}{of_commits(chart.commits)}" for chart in charts]


def of_commits(commits):
    """Below a table: what was measured."""
    commits = list(dict.fromkeys(commits))
    return f"\n\nCommit{'s' * (len(commits) > 1)} {', '.join(commits)}." if commits else ""


def sources(files):
    rows = [[f.name or f.kind, h["machine"]["device"], h["date"][:10], h["commit"][:7], f"`{h['command']}`"]
            for f in files for h in (f.head,)]  # fmt: skip
    return table(["stage", "machine", "date", "commit", "command"], list(map(list, dict.fromkeys(map(tuple, rows)))))


def measured(files):
    """One line: the machines, from when to when, and the commits."""
    heads = [f.head for f in files]
    devices = dict.fromkeys(head["machine"]["device"] for head in heads)
    dates = sorted({head["date"][:10] for head in heads})
    commits = dict.fromkeys(head["commit"][:7] for head in sorted(heads, key=lambda head: head["date"], reverse=True))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    where = f"**{' and '.join(devices)}**, {when}, commits {', '.join(commits)} (the newest first)"
    return f"{where}. [Sources](#sources) has each table's own."


def overview(every):
    """Ours over the best other by stage, and where another is faster."""
    if not any(each.other for each in every):
        return []
    by_stage, under = cells.summary(every), cells.under_one(every)
    slow = table(*under.table()) if under.rows else under.note
    return [f"### {by_stage.title}\n\n{table(*by_stage.table())}", f"### {under.title}\n\n{slow}"]


def listed(files, every):
    """A table for each file with problems of all kinds: ours, and how many times as fast that is as the best other."""
    stages = {cells.stage_of(f) for f in files if f.head.get("listed") or f.kind == "times"}
    parts = []
    for stage, group in cells.stages(every).items():
        if stage not in stages:
            continue
        passes = list(dict.fromkeys(each.which for each in group))
        rows = {}
        for each in group:
            ratio = f" ({each.ratio:.2f} x {each.other})" if each.other else ""
            rows.setdefault(each.title(), {})[each.which] = (each.more or f"{cell(each.ms)} ms") + ratio
        lines = [[title, *(found.get(which, "-") for which in passes)] for title, found in rows.items()]
        commits = of_commits(each.commit for each in group)
        parts.append(f"### {stage}\n\n{table([stage, *passes], lines)}{commits}")
    return parts


def summaries(charts):
    """One table per pass and set of lengths: TFLOP/s of ours, and how many times that is the fastest other."""
    groups = {}
    for chart in charts:
        if OURS in chart.series and len(chart.series) > 1:
            which, shape = chart.title.split(", ", 1)
            others = [name for name in chart.series if name != "triton" and not name.startswith(OURS)]
            others = [name for name in others if "packed" not in shape or name in TAKE_PACKED]
            cells, commits = zip(*(against(chart, others, i) for i in range(len(chart.x))), strict=True)
            groups.setdefault((which, tuple(chart.x)), []).append(([shape, *cells], set().union(*commits)))
    parts = []
    for (which, lengths), found in groups.items():
        rows, commits = zip(*found, strict=True)
        below = of_commits(sorted(set().union(*commits)))
        parts.append(f"### {which}, {span(lengths)}\n\n{table(['sequence length', *lengths], rows)}{below}")
    return parts


def span(lengths):
    """In a heading: "lengths 512 to 16384"."""
    if any(isinstance(length, str) for length in lengths):
        return "packed sequences"
    words = {1: "length {}", 2: "lengths {} and {}"}.get(len(lengths), "lengths {} to {}")
    return words.format(*dict.fromkeys((lengths[0], lengths[-1])))


def against(chart, others, index):
    """(in words, the commits that they speak of)"""
    values = {name: chart.series[name][index] for name in (OURS, *others) if chart.series[name][index]}
    mine, best = values.pop(OURS, None), max(values, key=values.get, default=None)
    commits = {chart.commit_of.get((name, index)) for name in (OURS, best)} - {None}
    return chart.text(OURS, index) + (f" ({mine / values[best]:.2f} x)" if mine and best else ""), commits


def summary(files, charts):
    """A row for each shape that was measured at both lengths, forward and backward, with its peers."""
    found = {}
    for chart in charts:
        which, shape = chart.title.split(", ", 1)
        if all(name in chart.series for name in (OURS, *SUMMARY_PEERS)) and set(SUMMARY_LENGTHS) <= set(chart.x):
            found.setdefault(shape, {})[which] = chart
    header = ["TFLOP/s", *(f"{which} {length}" for which in ("forward", "backward") for length in SUMMARY_LENGTHS)]
    rows = []
    for shape, charts_of in sorted(found.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        if set(charts_of) == {"Forward", "Backward"}:
            cells = [with_peers(charts_of[w], length) for w in ("Forward", "Backward") for length in SUMMARY_LENGTHS]
            rows.append([shape, *cells])
    peers = " / ".join(SUMMARY_PEERS.values())
    legend = f"Each cell: ours / {peers} (ours over the better one). Measured on {measured_on(behind(files, found))}."
    if any("~" in cell for row in rows for cell in row[1:]):
        legend += " `~`: the samples spread by more than 5 %."
    return table(header, rows) + "\n\n" + legend


def behind(files, shapes):
    """The files that hold the rows of these shapes at the lengths of the summary; of a row in two files the last counts."""
    last = {}
    for file in (f for f in files if f.kind == "speed"):
        for row in file.measured():
            case = row["case"]
            if row["baseline"] in (OURS, *SUMMARY_PEERS) and case["seq"] in SUMMARY_LENGTHS and shape_of(case) in shapes:
                last[shape_of(case), case["seq"], row["baseline"], row["pass"]] = file
    return [file for file in files if any(file is other for other in last.values())]


def measured_on(files):
    """Each machine whose speed was measured, with its commits."""
    commits = {}
    for head in (f.head for f in files if f.kind == "speed"):
        commits.setdefault(head["machine"]["device"], {})[head["commit"][:7]] = None
    return "; ".join(f"{device}, commit{'s' * (len(found) > 1)} {', '.join(found)}" for device, found in commits.items())


def with_peers(chart, length):
    index = chart.x.index(length)
    values = [chart.series[name][index] for name in (OURS, *SUMMARY_PEERS)]
    shown = " / ".join(chart.text(name, index) for name in (OURS, *SUMMARY_PEERS))
    return shown + (f" ({values[0] / max(values[1:]):.2f} x)" if all(values) else "")


def update(path, texts):
    """Replaces what is between the markers of a file by the text of that place; ValueError where it has none."""
    path = Path(path)
    old = new = path.read_text()
    found = False
    for place in PLACES:
        begin, end = (f"<!-- {place}:{word} -->" for word in ("begin", "end"))
        if begin not in old and end not in old:
            continue
        if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
            raise ValueError(f"{path}: allowed: a file with one line '{begin}' and, below it, one '{end}'")
        before, rest = new.split(begin)
        new = f"{before}{begin}\n\n{texts[place]}\n\n{end}{rest.split(end)[1]}"
        found = True
    if not found:
        raise ValueError(f"{path}: allowed: a file with one line '{BEGIN}' and, below it, one '{END}'")
    path.write_text(new)
