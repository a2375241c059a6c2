"""Names of arguments in errors.

A refusal has two attributes besides its text: `argument`, by the name that attention() has for it, and `sentence`, in which
the names of other arguments are in braces. An entrance whose caller knows other names has a constant table of them,
{"page_table": "block_table"}. renamed() puts them in, where the error leaves the entrance: `with Renamed(names):` in
Python, _core.attention() in C++.
"""

import re


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
    sentence = _MARK.sub(lambda mark: names.get(mark[1], mark[1]), error.sentence)
    found = type(error)(f"{name}: {sentence}")
    found.argument, found.sentence = name, error.sentence
    return found


class Renamed:
    """`with Renamed(names):` an error that leaves it is renamed() for the caller."""

    def __init__(self, names):
        self.names = names

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if isinstance(error, TypeError | ValueError | RuntimeError):
            found = renamed(error, self.names)
            if found is not error:
                raise found.with_traceback(trace) from None


_MARK = re.compile(r"\{(\w+)\}")
_HEAD = re.compile(r"(\w*)(.*)", re.DOTALL)
