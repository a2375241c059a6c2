"""What the benchmarks share on the command line, and how a run is kept: every row is saved at once."""

import argparse
import gc
import json
import re
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import cases
import machine
import package  # noqa: F401 (makes flash_attention importable)
import presets
import torch
from peers import baselines
from progress import Progress
from report.results import ResultError, Results, load

LOST = 3  # the exit status after a call that left the GPU unusable; another process can go on


def parser(description, output):
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", help=f"named cases: {', '.join(presets.PRESETS)}")
    for name, kind in (
        ("batch", int),
        ("heads", int),
        ("heads-kv", int),
        ("seq", int),
        ("head-dim", int),
        ("head-dim-v", int),
    ):
        p.add_argument(f"--{name}", type=kind, nargs="+", help="values of this axis, instead of a preset")
    p.add_argument("--tokens", type=int, help="batch = tokens / seq, instead of --batch")
    p.add_argument("--window", type=int, nargs="+", help="keys to the left that a query sees; 0 = all")
    p.add_argument("--softcap", type=float, nargs="+", help="cap * tanh(score / cap); 0 = none")
    p.add_argument("--dropout", type=float, nargs="+", dest="dropout_p", help="probabilities")
    p.add_argument("--dtype", nargs="+", help=", ".join(cases.DTYPES))
    p.add_argument("--mask", nargs="+", choices=("full", "causal"), help="full, causal or both")
    p.add_argument("--baselines", nargs="+", metavar="NAME", help="entries of --list; `ladder` is every rung")
    add_share(p, "cases")
    add_device(p)
    p.add_argument("--output", type=Path, default=Path(output), help=f"result file (default {output})")
    p.add_argument("--resume", action="store_true", help="keep the rows that are in the output and add the others")
    p.add_argument("--force", action="store_true", help="overwrite the output")
    p.add_argument("--quiet", action="store_true", help="no progress")
    p.add_argument("--list", action="store_true", help="print presets and baselines, and why one cannot run here")
    return p


def add_share(p, what):
    p.add_argument("--first", type=int, metavar="N", help=f"only the first N {what}")
    p.add_argument("--part", type=part, metavar="I/N", help=f"of the {what} the part I, counted from 0, of N equal ones")


def part(text):
    """(which, of how many) of "0/4"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected I/N with I from 0 to N - 1, as 0/4")
    return int(found[1]), int(found[2])


def share_of(arguments, work):
    """What --first and --part leave of a list."""
    work = work[: arguments.first]
    which, parts = arguments.part or (0, 1)
    return work[len(work) * which // parts : len(work) * (which + 1) // parts]


def add_device(p):
    usable = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)  # a GPU that is not here is refused by its flag

    def device(text):
        if text == "cuda" and text not in usable:
            raise argparse.ArgumentTypeError("got cuda, but torch sees no NVIDIA GPU here; allowed: cpu")
        return text

    p.add_argument("--device", type=device, choices=("cpu", "cuda"), default=usable[-1])


def chosen_cases(arguments, default):
    return share_of(arguments, all_cases(arguments, default))


def all_cases(arguments, default):
    names = "batch", "seq", "heads", "heads_kv", "head_dim", "head_dim_v", "window", "softcap", "dropout_p"
    axes = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    if arguments.preset and axes:
        raise ValueError(f"preset: got '{arguments.preset}' together with --{next(iter(axes))}; allowed: one or the other")
    masks = {"causal": [mask == "causal" for mask in arguments.mask]} if arguments.mask else {}
    if axes:
        usual = "bfloat16" if arguments.device == "cuda" else "float32"
        found = cases.product({**axes, **masks, "dtype": arguments.dtype or [usual]})
        return [replace(case, batch=arguments.tokens // case.seq) for case in found] if arguments.tokens else found
    found = [c for dtype in arguments.dtype or [None] for c in presets.preset(arguments.preset or default, dtype)]
    return [case for case in found if case.causal in masks["causal"]] if masks else found


def print_list(device):
    print("presets:")
    for name, function in presets.PRESETS.items():
        print(f"  {name:16} {function.__doc__}")
    print("baselines:")
    for entry in baselines.all_baselines().values():
        reason = entry.reject(cases.Case(1, 128, 1, 64, dtype="float32" if device == "cpu" else "bfloat16"), device)
        print(f"  {entry.name:16} {entry.what}" + (f" (not here: {reason})" if reason else ""))


def opened(path, kind, head, resume, force):
    """The results to add to. An output that exists is touched only with --resume, on the same machine, or --force."""
    if not path.exists() or force:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Results(kind, head)
    if not resume:
        raise ResultError(f"{path}: exists; allowed: --resume to add to it, --force to overwrite it, another --output")
    results = load(path)
    if results.kind != kind:
        raise ResultError(f"{path}: holds {results.kind} results; allowed: {kind}")
    for name in ("machine", "versions", "commit"):
        if results.head[name] != head[name]:
            raise ResultError(f"{path}: {name} was {results.head[name]}; here it is {head[name]}: use another --output")
    return results


def add_json(p):
    p.add_argument("--json", type=Path, help="write the results to this file, too")


class Times:
    """Rows with the times of all entries of a problem, written after each: a run that is stopped keeps what it has."""

    def __init__(self, path, device):
        self.path, self.results = path, Results("times", machine.facts(device) if path else {})

    def add(self, label, which, times, peers, **more):
        """peers: which of the entries are other libraries."""
        row = {"label": label, "pass": which, "times": times, "peers": [name for name in peers if name in times], **more}
        self.keep(row)
        return row

    def keep(self, row):
        self.results.rows.append(row)
        if self.path:
            self.results.save(self.path)

    @contextmanager
    def problem(self, label):
        """What goes wrong with one problem is a row with its reason, and the next one's turn."""
        try:
            yield
        except Exception as error:
            self.keep({"label": label, "pass": "forward", "reason": reason_of(error)})
            print(f"{label}: {reason_of(error)}", flush=True)
            release()

    def status(self):
        """Of the script: 1 where something went wrong."""
        return int(any("reason" in row for row in self.results.rows))


def reason_of(error):
    """First line of what went wrong, short enough for a table."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text[0]
    return "out of memory" if memory else f"{type(error).__name__}: {text[0][:160]}"


def measure_all(results, path, work, quiet):
    """work: [(identity of the row, function that returns its measurement)]. A failure is a row with its reason; Ctrl-C
    keeps what was measured."""
    known, at_work = results.keys(), at_work_of(path)
    work = [(identity, measure) for identity, measure in work if results.key(identity) not in known]
    results.save(path)
    with Progress(len(work), quiet) as progress:
        try:
            for identity, measure in work:
                at_work.write_text(json.dumps(identity))
                try:
                    row = {**identity, **measure()}
                except LostGpu as error:
                    row = {**identity, "reason": str(error), **({"baseline": error.entry} if error.entry else {})}
                except Exception as error:  # any failure of a baseline is a result
                    row = {**identity, "reason": reason_of(error)}
                results.rows.append(row)
                results.save(path)
                progress.step(line_of(row))
                if "reason" in row:
                    release()
                    if is_lost():
                        print(f"\nthe GPU is lost after {line_of(row)}; go on with --resume", file=sys.stderr)
                        raise SystemExit(LOST)
        except KeyboardInterrupt:
            print(f"\nstopped; {len(results.rows)} rows are in {path}; go on with --resume", file=sys.stderr)
            raise SystemExit(130) from None
        finally:
            at_work.unlink(missing_ok=True)


def at_work_of(path):
    """Says which row is measured: it outlives a process that a call has killed."""
    return Path(f"{path}.at_work")


def blame(path, number):
    """After the process died with this signal: its row gets that reason, and --resume goes on behind it."""
    results, at_work = load(path), at_work_of(path)
    results.rows.append({**json.loads(at_work.read_text()), "reason": f"the process died with signal {number}"})
    results.save(path)
    at_work.unlink()


class LostGpu(RuntimeError):
    """A call has left the GPU unusable for this process; entry: whose it was, where that is known."""

    def __init__(self, reason, entry=""):
        super().__init__(reason)
        self.entry = entry


def is_lost():
    """Whether an error has left the GPU unusable for this process."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return True
    return False


def release():
    """Gives back what a failed call may still hold."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # of a GPU that is lost
            torch.cuda.empty_cache()


def line_of(row):
    what = row.get("reason") or next((f"{row[n]} {n}" for n in ("tflops", "extra_bytes", "largest", "out") if n in row), "")
    return f"{row['baseline']} {row.get('pass', '')}: {what}"


def exit_on_bad_input(main):
    """Runs main(); what the user got wrong is one line and exit code 2."""
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
