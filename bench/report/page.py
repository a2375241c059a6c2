"""The report as one HTML file: no script, no network, light and dark."""

from html import escape

from .charts import Chart
from .svg import STYLE, draw

PAGE_STYLE = (
    STYLE + "body{margin:0 auto;max-width:920px;padding:1.5rem;background:var(--paper);color:var(--ink);"
    "font:15px/1.5 system-ui,sans-serif}h1{font-size:1.6rem}h2{margin-top:2.5rem;border-bottom:1px solid var(--faint)}"
    "figure{margin:1.5rem 0}figcaption{font-weight:600}svg{width:100%;height:auto}p.note{font-size:.85rem;opacity:.8}"
    "table{border-collapse:collapse;font-size:.8rem;display:block;overflow-x:auto}"
    "td,th{padding:.15rem .6rem;border-bottom:1px solid var(--faint);text-align:right}"
    "td:first-child,th:first-child{text-align:left}summary{cursor:pointer;font-size:.85rem}code{overflow-wrap:anywhere}"
)


def table(header, rows):
    head = "".join(f"<th>{escape(str(c))}</th>" for c in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def figure(chart):
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    caption = f"<figcaption>{escape(chart.title)}</figcaption>"
    if not isinstance(chart, Chart):
        return f"<figure>{caption}{table(*chart.table())}{note}</figure>"
    numbers = f"<details><summary>table</summary>{table(*chart.table())}</details>"
    return f"<figure>{caption}{draw(chart)}{note}{numbers}</figure>"


def environment(files):
    """Where the numbers come from, one row per file."""
    rows = []
    for results in files:
        head = results.head
        device = ", ".join(f"{name} {words(value)}" for name, value in head["machine"].items())
        versions = ", ".join(f"{name} {value}" for name, value in head["versions"].items())
        rows.append([results.kind, device, versions, head["commit"], head["date"], head["command"]])
    return table(["", "machine", "versions", "commit", "date", "command"], rows)


def words(value):
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def left_out(files):
    """Which entries could not run, and why."""
    reasons = {}
    for results in files:
        for row in results.rows:
            if "reason" in row:
                key = row.get("baseline") or row["label"], row["reason"]
                reasons[key] = reasons.get(key, 0) + 1
    return [[name, reason, str(times)] for (name, reason), times in sorted(reasons.items())]


def throttled(files):
    rows = [row for results in files for row in results.measured()]
    return sum(bool(row.get("throttled")) for row in rows), sum(bool(row.get("noisy")) for row in rows), len(rows)


def render(files, sections):
    held, noisy, total = throttled(files)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>flash_attention: measurements</title><style>{PAGE_STYLE}</style></head><body>",
        "<h1>flash_attention: measurements</h1>",
        f"<p>{total} measurements; {noisy} spread by more than 5 % of their median (pale, marked ~); the clock was held "
        f"down by power or heat during {held}. Every number is a median; hover over a mark to read it, or open the table "
        "below it.</p>",
    ]
    for heading, charts in sections:
        parts.append(f"<h2>{escape(heading)}</h2>")
        parts += [figure(chart) for chart in charts]
    reasons = left_out(files)
    if reasons:
        parts.append("<h2>Left out</h2>" + table(["entry", "reason", "rows"], reasons))
    parts.append("<h2>Environment</h2>" + environment(files) + "</body></html>\n")
    return "\n".join(parts)
