"""What a report of several files has, in order."""

from . import cells, panels


def sections(files):
    """[(heading, charts and tables)] of several result files; only what was measured. Files with cases of all kinds have
    tables and no charts by length."""
    rows = {kind: [] for kind in ("speed", "memory", "capacity", "accuracy", "models", "times")}
    for results in files:
        if not results.head.get("listed"):
            commit = results.head["commit"][:7]
            rows[results.kind] += [{**row, "commit": commit} for row in results.measured()]
    every = cells.cells(files)
    by_stage = [cells.summary(every), cells.under_one(every)] if any(each.other for each in every) else []
    found = [
        ("Ours over the best other", by_stage),
        ("Speed", panels.speed_charts(rows["speed"])),
        ("Speed-up", panels.speedup_charts(rows["speed"])),
        ("Every cell", cells.stage_tables(every)),
        ("Ladder", panels.ladder_charts(rows["speed"]) + panels.ladder_scaling_charts(rows["speed"])),
        ("Models", panels.model_tables(rows["models"])),
        ("Memory", panels.memory_charts(rows["memory"])),
        ("What fits", panels.capacity_tables(rows["capacity"])),
        ("Roofline", panels.roofline_charts([f for f in files if f.kind == "speed" and not f.head.get("listed")])),
        ("Accuracy", panels.accuracy_charts(rows["accuracy"])),
    ]
    return [(heading, charts) for heading, charts in found if charts]
