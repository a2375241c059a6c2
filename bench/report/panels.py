"""From result rows to charts: which rows stand side by side."""

from .charts import Chart, Table, cell

OURS = "ours"
# The others get a packed case padded: there is no ratio against those.
TAKE_PACKED = ("flash_attn", "flash_attn_3", "flashinfer")
SHOWN_FIRST = ("ours", "triton", "flash_attn_3", "flash_attn", "sdpa_cudnn", "sdpa_flash", "flex", "sdpa_efficient")


OPTIONS = (  # fields of a case that older files may not have, in words
    ("queries", "{} queries"),
    ("window", "window {}"),
    ("dropout_p", "dropout {}"),
    ("masked", "{} mask"),
    ("softcap", "softcap {:g}"),
    ("alibi", "ALiBi"),
    ("bias", "{} bias"),
)


def order(names):
    """Ours first, then the usual rivals, then the rest by name."""
    return sorted(set(names), key=lambda n: (SHOWN_FIRST.index(n) if n in SHOWN_FIRST else len(SHOWN_FIRST), n))


def shape_of(case):
    """What one panel holds still while the length varies, in words."""
    heads = f"{case['heads']}" + (f"/{case['heads_kv']}" if case["heads"] != case["heads_kv"] else "")
    dims = f"{case['head_dim']}" + (f"/{case['head_dim_v']}" if case.get("head_dim_v") else "")
    words = [f"head_dim {dims}", f"{heads} heads", "causal" if case["causal"] else "full", case["dtype"]]
    words += [text.format(case[name]) for name, text in OPTIONS if case.get(name)]
    return ", ".join(words + (["packed"] if case["lengths"] else []))


def length_of(case):
    return f"{len(case['lengths'])} of up to {case['seq']}" if case["lengths"] else case["seq"]


def grouped(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def by_length(rows, value):
    """(lengths, {baseline: [value or None per length]}, index of each row)"""
    lengths = list(dict.fromkeys(length_of(row["case"]) for row in rows))
    lengths.sort(key=lambda x: (isinstance(x, str), x))
    series = {name: [None] * len(lengths) for name in order(row["baseline"] for row in rows)}
    for row in rows:
        series[row["baseline"]][lengths.index(length_of(row["case"]))] = value(row)
    return lengths, series


def commits_of(rows, lengths):
    """Of the rows that `by_length` shows, by series and index: of several for one place the last one."""
    return {(row["baseline"], lengths.index(length_of(row["case"]))): row["commit"] for row in rows if "commit" in row}


def speed_charts(rows):
    """One panel of bars per pass and shape."""
    charts = []
    rows = [row for row in rows if not is_rung(row["baseline"])]
    for (which, shape), group in grouped(rows, lambda r: (r["pass"], shape_of(r["case"]))).items():
        lengths, series = by_length(group, lambda r: r["tflops"])
        unsure = {(r["baseline"], lengths.index(length_of(r["case"]))) for r in group if r.get("noisy")}
        name = f"speed {which} {shape}"
        title = f"{which.capitalize()}, {shape}"
        axes, commits = ("sequence length", "TFLOP/s"), commits_of(group, lengths)
        charts.append(Chart(name, title, "bars", *axes, lengths, series, unsure=unsure, commit_of=commits))
    return charts


def headline(rows):
    """What most people use and know, in the shape of most models: the first picture of README.md."""
    names = (OURS, "sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
    rows = [row for row in rows if row["baseline"] in names and row["pass"] == "forward"]
    return speed_charts([row for row in rows if shape_of(row["case"]) == "head_dim 128, 16 heads, causal, bfloat16"])


def ladder_charts(rows):
    """The rungs of the teaching ladder side by side, ending with standard attention and ours where they were measured."""
    charts = []
    places = grouped(rows, lambda r: (shape_of(r["case"]), length_of(r["case"])))
    for (shape, length), group in places.items():
        rungs = {row["baseline"]: row["tflops"] for row in group if row["pass"] == "forward"}
        names = [*sorted(n for n in rungs if is_rung(n)), *(n for n in ("standard", OURS) if n in rungs)]
        if any(is_rung(n) for n in names):
            labels = [name.removeprefix("ladder/") for name in names]
            title = f"The ladder: forward, L {length}, {shape}"
            values = {"TFLOP/s": [rungs[name] for name in names]}
            charts.append(Chart(f"ladder {shape} {length}", title, "bars", "rung", "TFLOP/s", labels, values))
    return charts


def ladder_staircase(rows):
    """One bar a rung, where most rungs were measured: a step as high as the idea is worth (the axis is logarithmic)."""
    rows = [row for row in rows if is_rung(row["baseline"]) and row["pass"] == "forward"]
    places = grouped(rows, lambda r: (shape_of(r["case"]), length_of(r["case"])))
    if not places:
        return []
    (shape, length), group = max(places.items(), key=lambda place: (len(place[1]), place[0][1]))
    rungs = {row["baseline"].removeprefix("ladder/"): row["tflops"] for row in group}
    names = sorted(rungs)
    title = f"The ladder, one bar a rung: forward, L {length}, {shape}"
    values = {"ours": [rungs[name] for name in names]}
    labels = [name.partition("_")[0] for name in names]
    return [Chart("ladder staircase", title, "bars", "rung", "TFLOP/s", labels, values, log_y=True)]


def ladder_scaling_charts(rows):
    """Every rung by length, for each choice of heads and mask that was measured at several lengths."""
    charts = []
    rows = [row for row in rows if is_rung(row["baseline"]) and row["pass"] == "forward"]
    for shape, group in grouped(rows, lambda r: shape_of(r["case"])).items():
        lengths, series = by_length(group, lambda r: r["tflops"])
        if len(lengths) > 1:
            tokens = {row["case"]["batch"] * row["case"]["seq"] for row in group}
            batch = f"{tokens.pop()} tokens" if len(tokens) == 1 else "batch 1"
            series = {name.removeprefix("ladder/"): values for name, values in series.items()}
            case = group[0]["case"]  # the name is that of an image in docs/ladder/
            mask = "causal" if case["causal"] else "full"
            name = f"ladder by length {case['heads']} heads head_dim {case['head_dim']} {mask} {case['dtype']}"
            title = f"The ladder by length: {batch}, {shape}"
            axes = "sequence length", "TFLOP/s"
            charts.append(Chart(name, title, "lines", *axes, lengths, series, log_x=True, log_y=True))
    return charts


def is_rung(name):
    return name.startswith("ladder/")


def speedup_charts(rows):
    """As timed alone, and, where that was measured, between matrix products of torch, as in a model."""
    between = [row for row in rows if "interleaved_ms" in row]
    return [*speedups(rows, "ms", ""), *speedups(between, "interleaved_ms", ", between matrix products")]


def speedups(rows, field, where):
    """Ours against the fastest other entry, and against each of the usual rivals: shapes down, lengths across."""
    cells = grouped(rows, lambda r: (r["pass"], shape_of(r["case"]), length_of(r["case"])))
    rivals = [n for n in ("sdpa_cudnn", "sdpa_flash", "flash_attn_3", "standard") if any(r["baseline"] == n for r in rows)]
    charts = []
    for rival in ("the fastest other", *rivals):
        found = {}
        for place, group in cells.items():
            ms = {row["baseline"]: row[field] for row in group}
            mine = ms.pop(OURS, None)
            packed = group[0]["case"]["lengths"]
            ms = {n: t for n, t in ms.items() if not is_rung(n) and n != "triton" and not n.startswith(OURS)}
            ms = {n: t for n, t in ms.items() if not packed or n in TAKE_PACKED}
            other = ms.get(rival) if rival in rivals else min(ms.values(), default=None)
            if mine and other:
                found[place] = other / mine
        if found:
            lengths = sorted({p[2] for p in found}, key=lambda x: (isinstance(x, str), x))
            shapes = dict.fromkeys((p[0], p[1]) for p in found)
            series = {f"{w}, {s}": [found.get((w, s, length)) for length in lengths] for w, s in shapes}
            title = f"Speed of ours over {rival}{where}"
            charts.append(
                Chart(f"speedup {rival}{where}", title, "heat", "sequence length", "times as fast", lengths, series)
            )
    return charts


def memory_charts(rows):
    charts = []
    for (which, shape), group in grouped(rows, lambda r: (r["pass"], shape_of(r["case"]))).items():
        lengths, series = by_length(group, lambda r: r["peak_bytes"] / 1e9)
        what = "Forward and backward" if which == "both" else "Forward"
        charts.append(
            Chart(f"memory {which} {shape}", f"Peak memory: {what.lower()}, {shape}", "lines", "sequence length", "GB",
                  lengths, series, log_x=True, log_y=True, note="Inputs, outputs and gradients are included.",
                  commit_of=commits_of(group, lengths))
        )  # fmt: skip
    return charts


def capacity_tables(rows):
    tables = []
    for _, group in grouped(rows, lambda r: str(r["search"])).items():
        axis, budget, case = (group[0]["search"][name] for name in ("axis", "budget_gb", "case"))
        fixed = f"L {case['seq']}" if axis == "batch" else f"batch {case['batch']}"
        what = "Largest batch" if axis == "batch" else "Longest sequence"
        best = {row["baseline"]: row["largest"] for row in group}
        base = best.get("standard") or best.get("sdpa_math")
        rows_ = []
        for row in sorted(group, key=lambda r: -r["largest"]):
            more = " or more" if row.get("at_limit") else ""
            gain = f"{row['largest'] / base:.1f} x" if base else "-"
            rows_.append([row["baseline"], f"{row['largest']}{more}", gain])
        title = f"{what} in {budget:g} GB: forward and backward, {fixed}, {shape_of(case)}"
        heads = ["", what.lower(), "against standard attention"]
        commits = tuple(dict.fromkeys(row["commit"] for row in group if row.get("commit")))
        tables.append(Table(f"capacity {axis} {shape_of(case)}", title, heads, rows_, commits=commits))
    return tables


def roofline_charts(files):
    """Every forward row of a machine at its arithmetic intensity, under what the machine was measured to do at best: one
    chart for what people use, one for the rungs of the ladder."""
    charts = []
    for device, group in grouped(files, lambda results: results.head["machine"]["device"]).items():
        roofs = [results.head["ceilings"] for results in group if results.head.get("ceilings")]
        if not roofs:
            continue
        roof = max(roofs, key=lambda ceilings: ceilings["tflops"])
        rows = [row for results in group for row in results.measured() if row["pass"] == "forward"]
        for title, key, held in (
            ("Roofline, forward", "roofline", [row for row in rows if not is_rung(row["baseline"])]),
            ("Roofline, the ladder", "roofline ladder", [row for row in rows if is_rung(row["baseline"])]),
        ):
            if held:
                charts.append(roofline_chart(f"{title}, {device}", key, held, roof))
    return charts


def roofline_chart(title, key, rows, ceilings):
    points = {}
    for row in rows:
        points.setdefault(row["baseline"], set()).add((intensity(row), row["tflops"]))
    series = {name.removeprefix("ladder/"): sorted(points[name]) for name in order(points)}
    note = (
        f"Roof: {ceilings['tflops']:.3g} TFLOP/s, a {ceilings['dtype']} matrix product; slope: "
        f"{ceilings['copy_gbs']:.0f} GB/s, a copy; both measured on this machine. Intensity counts every tensor once, "
        "whatever a kernel really moves."
    )
    return Chart(key, title, "points", "FLOP per byte", "TFLOP/s", [], series, True, True, ceilings=ceilings, note=note)


def intensity(row):
    """FLOPs for each byte of q, k, v and out; the ladder's rows, which are full or causal and dense, do not bring it."""
    if "intensity" in row:
        return row["intensity"]
    case = row["case"]
    heads = case["heads"] + case["heads_kv"]
    per_byte = 2 * case["heads"] * case["seq"] / (heads * (4 if case["dtype"] == "float32" else 2))
    return per_byte / 2 if case["causal"] else per_byte


def accuracy_charts(rows):
    charts = []
    for shape, group in grouped(rows, lambda r: shape_of(r["case"])).items():
        for value in ("out", "dq", "dk", "dv"):
            held = [row for row in group if value in row]
            if held:
                lengths, series = by_length(held, lambda r, v=value: r[v]["rms"])
                charts.append(
                    Chart(f"accuracy {value} {shape}", f"Error of {value} against fp64, {shape}", "lines",
                          "sequence length", "relative RMS error", lengths, series, log_x=True, log_y=True)
                )  # fmt: skip
    return charts


def model_tables(rows):
    """Whole models with each attention, by tokens."""
    tables = []
    for (model, layers, dtype, autocast, which), group in grouped(
        rows,
        lambda r: (
            r["case"]["model"],
            r["case"].get("layers"),
            r["case"]["dtype"],
            r["case"].get("autocast", False),
            r["pass"],
        ),
    ).items():
        times = {(row["case"]["seq"], row["baseline"]): row["ms"] for row in group}
        paired = {row["case"]["seq"]: row.get("against_sdpa") for row in group if row["baseline"] == "ours"}
        names = list(dict.fromkeys(row["baseline"] for row in group))
        lines = []
        for seq in sorted({seq for seq, _ in times}):
            mine, theirs = times.get((seq, "ours")), times.get((seq, "sdpa"))
            gain = f"{paired[seq] or theirs / mine:.2f} x" if mine and theirs else "-"
            lines.append([str(seq), *(cell(times.get((seq, name))) for name in names), gain])
        depth, how = f" of {layers} layers" if layers else "", f"{dtype} by autocast" if autocast else dtype
        title = f"A {model}-like model{depth}, {which}, {how}: milliseconds a step"
        key = " ".join(str(part) for part in ("model", model, layers, how, which) if part)
        columns = ["tokens", *names, "speed-up" if len(names) <= 2 else "speed-up over sdpa"]
        tables.append(Table(key, title, columns, lines))
    return tables
