"""Names of arguments in errors.

A refusal has two attributes besides its text: `argument`, by the name that attention() has for it, and `sentence`, in which
the names of other arguments are in braces. An entrance whose caller knows other names has a constant table of them,
{"page_table": "block_table"}. renamed() puts them in, where the error leaves the entrance: `with Renamed(names):` in
Python, _core.attention() in C++. A graph of torch.compile has no entrance: its operations are given the tables as text.
"""

import functools
import re

from flash_attention.tracing import is_tracing


def refusal(kind, argument, sentence):
    """An exception of that kind, "ARGUMENT: SENTENCE"."""
    error = kind(f"{argument}: " + _MARK.sub(r"\1", sentence))
    error.argument, error.sentence = argument, sentence
    return error


def renamed(error, names):
    """The error in the caller's words; itself if it is no refusal of an argument."""
    argument = getattr(error, "argument", None)
    if argument is None:
        return error
    name, end = _HEAD.match(argument).groups()  # seqused_kv[0]
    name = names.get(name, name) + end
    return refusal(type(error), name, _MARK.sub(lambda mark: f"{{{names.get(mark[1], mark[1])}}}", error.sentence))


class Renamed:
    """`with Renamed(names):` an error that leaves it is renamed() for the caller. Of several tables the first is the
    innermost."""

    def __init__(self, *tables):
        self.tables = tables

    def __enter__(self):
        if is_tracing():
            _around.append(self.tables)

    def __exit__(self, kind, error, trace):
        if is_tracing():
            _around.pop()
        if isinstance(error, (TypeError, ValueError, RuntimeError)):  # torch.compile of torch 2.9 does not trace a union
            found = functools.reduce(renamed, self.tables, error)
            if found is not error:
                raise found.with_traceback(trace) from None


_around = []  # tables of the entrances that torch.compile is in; empty outside of a trace


def as_text():
    """The tables around a call that is traced, for an operation of the graph; else ""."""
    if not is_tracing():
        return ""
    tables = [table for tables in reversed(_around) for table in tables]
    return ";".join([",".join([f"{ours}={theirs}" for ours, theirs in table.items()]) for table in tables])


@functools.cache
def renamed_by(text=""):
    """Renamed() of what as_text() gave."""
    tables = [table.split(",") for table in text.split(";") if table]
    return Renamed(*(dict(pair.split("=") for pair in table) for table in tables))


_MARK = re.compile(r"\{(\w+(?:\[\d\])?)\}")
_HEAD = re.compile(r"(\w*)(.*)", re.DOTALL)
