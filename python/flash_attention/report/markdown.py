"""The speed tables as Markdown, and their place in a README."""

from pathlib import Path

from .panels import OURS

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"


def table(header, rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def render(files, sections):
    """Ours against the fastest other everywhere, every entry where most were measured, memory and what fits."""
    held = dict(sections)
    speed = held.get("Speed", [])
    widest = max((len(chart.series) for chart in speed), default=0)
    parts = summaries(speed)
    for chart in [*(c for c in speed if len(c.series) >= widest - 1), *held.get("Memory", []), *held.get("What fits", [])]:
        unit = f" ({chart.y_label})" if hasattr(chart, "y_label") else ""
        parts.append(f"**{chart.title}{unit}**\n\n{table(*chart.table())}")
    heads = [results.head for results in files]
    sources = dict.fromkeys(f"{h['machine']['device']}, commit {h['commit']}, `{h['command']}`" for h in heads)
    return "\n\n".join([*parts, "Measured on " + "; ".join(sources) + "."])


def summaries(charts):
    """One table per pass and set of lengths: TFLOP/s of ours, and how many times that is the fastest other."""
    groups = {}
    for chart in charts:
        others = [name for name in chart.series if name not in (OURS, "triton")]
        if OURS in chart.series and others:
            cells = [against(chart, others, i) for i in range(len(chart.x))]
            which, shape = chart.title.split(", ", 1)
            groups.setdefault((which, tuple(chart.x)), []).append([shape, *cells])
    return [
        f"**{which}, TFLOP/s of ours (times the fastest other)**\n\n{table(['sequence length', *lengths], rows)}"
        for (which, lengths), rows in groups.items()
    ]


def against(chart, others, index):
    mine, best = chart.series[OURS][index], max((chart.series[n][index] or 0.0 for n in others), default=0.0)
    return chart.text(OURS, index) + (f" ({mine / best:.2f} x)" if mine and best else "")


def update(path, text):
    """Replaces what is between the markers of a file; ValueError where it has none."""
    path = Path(path)
    old = path.read_text()
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise ValueError(f"{path}: allowed: a file with one line '{BEGIN}' and, below it, one '{END}'")
    before, rest = old.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
