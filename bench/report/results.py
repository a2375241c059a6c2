"""The result file: JSON with a head (machine, versions, commit, command) and one row per line.

    {"format": "flash_attention.results/1", "kind": "speed", "machine": {...}, ..., "rows": [
    {"case": {...}, "baseline": "ours", "pass": "forward", "ms": 1.2, ...},
    {"case": {...}, "baseline": "flash_attn", "pass": "forward", "reason": "flash_attn is not installed"}
    ]}

A row holds either its measurement or the `reason` why there is none. A row of kind "times" holds all entries of a problem,
{"ours": {"ms": ...}, "cudnn": {"ms": ...}}, ours first, and names those that are other libraries (`peers`).
"""

import json
import os
from pathlib import Path

FORMAT = "flash_attention.results/1"
KINDS = {  # what identifies a row, and what a measured row must hold
    "speed": (("case", "baseline", "pass"), ("ms", "p10", "p90", "samples", "tflops")),
    "memory": (("case", "baseline", "pass"), ("peak_bytes", "extra_bytes")),
    "capacity": (("search", "baseline"), ("largest",)),
    "accuracy": (("case", "baseline"), ("out",)),
    "models": (("case", "baseline", "pass"), ("ms", "p10", "p90", "samples")),
    "times": (("label", "pass"), ("times", "peers")),
}


class ResultError(ValueError):
    """The file is not a result file; the message names it and the line."""


class Results:
    def __init__(self, kind, head, rows=(), name=""):
        self.kind, self.head, self.rows, self.name = kind, head, list(rows), name

    def key(self, row):
        return json.dumps([row[name] for name in KINDS[self.kind][0]], sort_keys=True)

    def keys(self):
        return {self.key(row) for row in self.rows}

    def measured(self):
        return [row for row in self.rows if "reason" not in row]

    def save(self, path):
        """Written next to the file and moved over it, so that an interruption leaves the old or the new one."""
        head = json.dumps({"format": FORMAT, "kind": self.kind, **self.head}, indent=1)
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        temporary.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n')
        temporary.replace(path)


def load(path):
    """Reads and checks a file; ResultError names the file, the line and what is wrong."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ResultError(f"{path}: line {error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ResultError(f"{path}: line 1: format: got {found!r}; allowed: '{FORMAT}'")
    kind = data.get("kind")
    if kind not in KINDS:
        raise ResultError(f"{path}: line 1: kind: got {kind!r}; allowed: {', '.join(KINDS)}")
    for name in ("machine", "versions", "commit", "date", "command", "rows"):
        if name not in data:
            raise ResultError(f"{path}: line 1: '{name}' is missing")
    identity, measurement = KINDS[kind]
    for row, line in zip(data["rows"], row_lines(text), strict=True):
        needed = identity if isinstance(row, dict) and "reason" in row else identity + measurement
        missing = [name for name in needed if not isinstance(row, dict) or name not in row]
        if missing:
            raise ResultError(f"{path}: line {line}: a {kind} row without {', '.join(missing)}")
    head = {name: value for name, value in data.items() if name not in ("format", "kind", "rows")}
    return Results(kind, head, data["rows"], Path(path).stem)


def row_lines(text):
    """The line on which each row begins, in a text that is known to be JSON."""
    decoder = json.JSONDecoder()
    position = text.index("[", text.rindex('"rows"')) + 1
    while True:
        while text[position] in " \t\r\n,":
            position += 1
        if text[position] == "]":
            return
        yield text.count("\n", 0, position) + 1
        _, position = decoder.raw_decode(text, position)
