"""Measures alternatives to the planner's rules on this machine, and keeps those that are faster (docs/your_gpu.md)."""

from __future__ import annotations

from flash_attention import _core
from flash_attention.arguments.keywords import refuse_keywords

TYPE_CHECKING = False  # typing costs more to import than the rest of the package
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn


def tune(
    problems: str | os.PathLike[str] | Sequence[dict[str, Any]] | None = None,
    *,
    device: str | None = None,
    budget: float = 60.0,
    again: bool = False,
    progress: bool | Callable[[int, int, str, float], Any] = True,
    export: str | os.PathLike[str] | None = None,
    **wrong: NoReturn,
) -> list[dict[str, Any]]:
    """Measures other kernels, tiles, stages and splits than the planner's own and keeps the faster ones for later calls.

        for row in tune(budget=60):
            print(row["choice"], row["gain"])

    problems: a file that a program wrote with FLASH_ATTENTION_RECORD=FILE, or a list of {"pass": "forward", "problem":
    {"batch": 1, "seq_q": 4096, ...}}; the usual ones if None. device: "cuda:0", "cpu"; the fastest one if None. budget:
    seconds for everything; results until then are kept, also after Control-C. again: repeat problems that were tuned
    before.
    progress: a line on stderr, or a function of (done, of, what, seconds). export: a file for import_tuned.

    Returns a dictionary for each problem: the planner's choice ("usual"), the fastest ("choice"), their times, "gain",
    "noise", and what was "dropped" because its results were wrong. A choice is kept only if it gains more than the noise.
    """
    if wrong:
        refuse_keywords(tune, wrong)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"budget: expected seconds, got {type(budget).__name__}")
    text, name = _problems(problems)
    show = _show if progress is True else progress or None
    try:
        results = _core.tune(device or "", text, name, float(budget), bool(again), show)
    finally:
        if show is _show:
            _clear()
    if export is not None:
        export_tuned(export, device=device)
    return results


def export_tuned(path: str | os.PathLike[str], *, device: str | None = None, **wrong: NoReturn) -> None:
    """Writes everything that is known of a device to a file, to be shared with machines that have the same GPU.

    For example:

        export_tuned("my_gpu.json")
    """
    if wrong:
        refuse_keywords(export_tuned, wrong)
    text = _core.export_tuned(device or "")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def import_tuned(path: str | os.PathLike[str], *, device: str | None = None, **wrong: NoReturn) -> int:
    """Takes the choices of such a file; returns how many. A damaged file or one of another GPU is refused by name.

    For example:

        import_tuned("my_gpu.json")
    """
    if wrong:
        refuse_keywords(import_tuned, wrong)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    return _core.import_tuned(device or "", text, str(path))


def _problems(problems: Any) -> tuple[str, str]:
    import json
    from os import PathLike

    if problems is None:
        return "", "problems"
    if isinstance(problems, str | PathLike):
        with open(problems, encoding="utf-8") as file:
            return file.read() or "\n", str(problems)
    return json.dumps(list(problems)), "problems"


def _show(done: int, of: int, what: str, seconds: float) -> None:
    import sys

    if sys.stderr.isatty():
        bar = "#" * (20 * done // max(of, 1))
        sys.stderr.write(f"\r\033[K[{bar:.<20}] {done} of {of}, {seconds:.0f} s: {what}"[:160])
        sys.stderr.flush()


def _clear() -> None:
    import sys

    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
