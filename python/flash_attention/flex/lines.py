"""Which line of the user's is at work, for messages."""

import linecache
import os
import sys

import torch

_PLACES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


def where_is_user():
    """'file.py:12: the source' of the innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PLACES):
        frame = frame.f_back
    return "?" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def where_it_was(traceback):
    """The same of an error's traceback; None if the error was no line of the user's."""
    found = None
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(_PLACES):
            found = _line(name, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _line(name, line):
    return f"{os.path.basename(name)}:{line}: {linecache.getline(name, line).strip()}"


def in_a_function_of_autograd(inside_of):
    """Whether the forward pass of one runs and was called by `inside_of` or below it: the whole call may be in another.
    Function.apply is no sign: in some versions of torch it leaves no frame."""
    forwards = set(_forwards(torch.autograd.Function))
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not inside_of.__code__:
        if frame.f_code in forwards:
            return True
        frame = frame.f_back
    return False


def _forwards(function):
    """The code of the forward pass of each class below one."""
    for made in function.__subclasses__():
        yield getattr(made.forward, "__code__", None)
        yield from _forwards(made)
