"""Ours against the best of the others, cell by cell: a cell is one problem and pass of one file."""

import json
import statistics
from dataclasses import dataclass

from cases import Case, job

from .charts import Table, cell
from .panels import OPTIONS, TAKE_PACKED, is_rung

OWN = ("triton", "standard")  # besides those whose name begins with "ours": no other library
BETWEEN = ", between matrix products"


@dataclass
class Cell:
    stage: str  # the name of the file
    shape: str
    which: str  # the pass
    name: str  # of ours
    ms: float
    other: str = ""  # the fastest of the others, empty where there is none
    other_ms: float = 0.0
    more: str = ""  # of ours: TFLOP/s or GB/s
    paired: float | None = None  # the ratio, where each run of ours has one of the other beside it
    commit: str = ""  # of ours

    @property
    def ratio(self):
        """How many times as fast as the other."""
        return self.paired or (self.other_ms / self.ms if self.other else None)

    def title(self):
        return self.shape + ("" if self.name == "ours" else f" ({self.name})")


def cells(files):
    """All of them, in the order of the files; where a file comes twice, the last one counts."""
    files = {f.name or id(f): f for f in files}.values()
    found = []
    for results in files:
        for each in MAKERS[results.kind](results, files) if results.kind in MAKERS else []:
            each.commit = results.head["commit"][:7]
            found.append(each)
    return found


def stage_of(results):
    return results.name or results.kind


def is_own(name):
    return name.startswith("ours") or name in OWN or is_rung(name)


def identity(row):
    """Of a case and pass; files that were written before there was an option have no word about it."""
    case = {name: value for name, value in row["case"].items() if value}
    return json.dumps([case, row["pass"]], sort_keys=True)


def of_speed(results, files):
    """Entries of a file that has none of ours, as one of FlexAttention alone, stand against ours of the others."""
    others = {}
    for file in files:
        if file.kind == "speed" and (file is results or not any(is_own(row["baseline"]) for row in file.rows)):
            for row in file.measured():
                if not is_own(row["baseline"]):
                    others.setdefault(identity(row), {})[row["baseline"]] = row
    found, plain = [], {(identity(row), row["baseline"]): row["tflops"] for row in results.measured()}
    for row in results.measured():
        if not row["baseline"].startswith("ours"):
            continue
        shape, packed = Case.from_json(row["case"]).label(), row["case"]["lengths"]
        peers = others.get(identity(row), {})
        peers = {name: peer for name, peer in peers.items() if job(name) == job(row["baseline"])}
        peers = {name: peer for name, peer in peers.items() if not packed or name in TAKE_PACKED}
        for field, where in measurements(row):
            times = {name: peer[field] for name, peer in peers.items() if field in peer}
            more = f"{cell(row['tflops'])} TFLOP/s" + of_plain(row, plain) if field == "ms" else ""
            mine = Cell(stage_of(results), shape, row["pass"] + where, row["baseline"], row[field], more=more)
            found.append(against(mine, times))
    return found


def measurements(row):
    """(field, where it was measured): one or both."""
    if row.get("interleaved_ms") == row["ms"]:  # measured between matrix products alone
        return [("ms", BETWEEN)]
    return [("ms", ""), ("interleaved_ms", BETWEEN)] if "interleaved_ms" in row else [("ms", "")]


def of_plain(row, tflops):
    """In words, where the file has the same problem without its options: what part of that rate is left."""
    options = [name for name, _ in OPTIONS if name != "queries" and row["case"].get(name)]
    bare = {name: value for name, value in row["case"].items() if name not in options}
    plain = tflops.get((identity({**row, "case": bare}), row["baseline"])) if options else None
    return f", {row['tflops'] / plain:.2f} of plain" if plain else ""


def against(mine, times):
    """With the fastest of {name: milliseconds}."""
    if times:
        mine.other = min(times, key=times.get)
        mine.other_ms = times[mine.other]
    return mine


def of_models(results, files):
    times = {}
    for row in results.measured():
        times.setdefault((json.dumps(row["case"]), row["pass"]), {})[row["baseline"]] = row["ms"]
    found = []
    for row in results.measured():
        if row["baseline"] == "ours":
            case = row["case"]
            peers = {name: ms for name, ms in times[json.dumps(case), row["pass"]].items() if name != "ours"}
            layers = f" of {case['layers']} layers" if "layers" in case else ""
            how = " by autocast" if case.get("autocast") else ""
            shape = f"{case['model']}{layers}, B{case['batch']} L{case['seq']}, {case['dtype']}{how}"
            mine = against(Cell(stage_of(results), shape, row["pass"], "ours", row["ms"]), peers)
            if mine.other == "sdpa":  # each step of ours has one of its own beside it
                mine.paired = row.get("against_sdpa")
            found.append(mine)
    return found


def of_times(results, files):
    found = []
    for row in results.measured():
        (name, first), *_ = row["times"].items()
        more = f"{cell(first['tflops'])} TFLOP/s" if "tflops" in first else f"{row['gbs']:.0f} GB/s" if "gbs" in row else ""
        mine = Cell(stage_of(results), row["label"], row["pass"], name, first["ms"], more=more)
        found.append(against(mine, {peer: row["times"][peer]["ms"] for peer in row["peers"]}))
        for other, times in row["times"].items():
            if other.startswith("ours,"):  # the same problem in another form, as with a cache of 8 bits
                more = f"{cell(times['tflops'])} TFLOP/s" if "tflops" in times else ""
                found.append(Cell(stage_of(results), row["label"], row["pass"], other, times["ms"], more=more))
    return found


MAKERS = {"speed": of_speed, "models": of_models, "times": of_times}


def stages(found):
    """{stage: its cells}"""
    groups = {}
    for each in found:
        groups.setdefault(each.stage, []).append(each)
    return groups


def summary(found):
    """A row for each stage."""
    rows = []
    for stage, group in stages(found).items():
        rated = [each for each in group if each.other]
        if not rated:
            continue
        least = min(rated, key=lambda each: each.ratio)
        mean = statistics.geometric_mean(each.ratio for each in rated)
        under = sum(each.ratio < 1 for each in rated)
        where = f"{least.title()}, {least.which}"
        rows.append([stage, str(len(rated)), f"{mean:.3f}", f"{least.ratio:.3f}", where, str(under), least.commit])
    header = ["stage", "cells", "geometric mean", "least", "of", "under 1.0", "commit"]
    return Table("stages", "Ours over the best other, by stage", header, rows)


def stage_tables(found):
    """Every cell of every stage."""
    tables = []
    for stage, group in stages(found).items():
        rows = []
        for each in group:
            other = [cell(each.other_ms), each.other, f"{each.ratio:.3f}"] if each.other else ["-", "-", "-"]
            rows.append([each.title(), each.which, cell(each.ms), each.more, *other])
        header = ["problem", "pass", "ours, ms", "", "best other, ms", "which", "times as fast"]
        tables.append(Table(f"cells {stage}", f"Every cell of {stage}", header, rows))
    return tables


def under_one(found):
    """The cells in which another is faster, the worst first."""
    slow = sorted((each for each in found if each.other and each.ratio < 1), key=lambda each: each.ratio)
    rows = []
    for each in slow:
        times = [cell(each.ms), cell(each.other_ms), each.other, f"{each.ratio:.3f}"]
        rows.append([each.stage, each.title(), each.which, *times, each.commit])
    header = ["stage", "problem", "pass", "ours, ms", "best other, ms", "which", "times as fast", "commit"]
    note = "" if rows else "There is none."
    return Table("cells under one", "Cells under 1.0", header, rows, note)
