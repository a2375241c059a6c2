"""Programs that were recorded before.

What a function does on symbols follows from its code and from what it captures: numbers by value, tensors by dtype and
shape. Where that is all there is to it, the function is not run again.
"""

import types

import torch

_CAPACITY = 256
_STABLE_MODULES = ("torch", "math", "numpy", "builtins")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_programs = {}


class _Unknown(Exception):
    """Something that may change without a trace of it."""


class Surroundings:
    """What a few functions can see: a key for it, and the tensors among it, in order."""

    def __init__(self, functions):
        self.tensors, self._seen = [], {}
        try:
            self.key = tuple(self._describe(function) for function in functions)
        except _Unknown:
            self.key = None

    def _describe(self, thing):
        if isinstance(thing, _PLAIN):
            return type(thing), thing
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing)
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, tuple | list):
            return type(thing), tuple(map(self._describe, thing))
        if isinstance(thing, types.ModuleType) and _is_stable(thing.__name__):
            return thing.__name__
        if isinstance(thing, type) and _is_stable(thing.__module__):  # the user's own has attributes that change
            return thing
        if isinstance(thing, types.MethodDescriptorType):
            return thing
        if isinstance(thing, types.BuiltinFunctionType) and isinstance(thing.__self__, types.ModuleType | type | None):
            return thing  # no method of an object
        raise _Unknown

    def _tensor(self, tensor):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _Unknown
        for n, known in enumerate(self.tensors):
            if known is tensor:
                return n
        self.tensors.append(tensor)
        return torch.Tensor, tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad

    def _function(self, function):
        if id(function) in self._seen:
            return "again", self._seen[id(function)]
        self._seen[id(function)] = len(self._seen)
        seen = [function.__code__, self._describe(function.__defaults__)]
        for named in (function.__kwdefaults__ or {}, function.__dict__):
            seen.extend((name, self._describe(value)) for name, value in named.items())
        for cell in function.__closure__ or ():
            try:
                seen.append(self._describe(cell.cell_contents))
            except ValueError:  # not filled yet
                raise _Unknown from None
        names = _names_of(function.__code__)
        seen.extend((name, self._describe(function.__globals__[name])) for name in names if name in function.__globals__)
        return tuple(seen)


def _is_stable(module):
    return module.partition(".")[0] in _STABLE_MODULES


def _names_of(code):
    """Of globals, and of attributes, which does no harm."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_of(constant)
    return names


def find(surroundings):
    """(text, the places of its tensors among the surroundings', numbers, places of lines), or None."""
    return None if surroundings.key is None else _programs.get(surroundings.key)


def keep(surroundings, recorder, text, places):
    """Unless the function has computed something by itself, which may differ the next time."""
    if surroundings.key is None or not recorder.only_symbols:
        return
    slots = []
    for tensor in recorder.tensors:
        slots += [n for n, known in enumerate(surroundings.tensors) if known is tensor]
    if len(slots) != len(recorder.tensors):
        return
    if len(_programs) >= _CAPACITY:
        _programs.clear()
    _programs[surroundings.key] = (text, slots, recorder.numbers, places)
