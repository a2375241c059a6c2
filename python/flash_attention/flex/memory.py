"""Programs that were recorded before.

What a function does on symbols follows from its code and from what it can see: the value of a number, the dtype and shape
of a tensor, and the same of another function. If it sees nothing else, it is not run again. Other things may change without
a trace (an attribute of an object, a class, a dictionary, a state of torch). They are unknown, and a function that can see
one of them is recorded in every call.
"""

import builtins
import dis
import functools
import sys
import types

import torch

_CAPACITY = 256
_UNCHANGING = {bool, int, str, type(None), torch.dtype, torch.device}
_MODULES = {"torch", "math", "operator", "numpy", "torch.nn", "torch.nn.functional", "torch.special"}
_ROOTS = {"torch", "math", "_operator", "builtins", "numpy"}  # of types and functions that stay what they are
# Names by which a function may ask for a state: of generators, modes, backends.
_ASKS = ("get_", "is_", "are_")
_STATES = {"random", "initial_seed", "seed", "backends", "cuda", "compiler", "utils", "distributed", "default_generator"}
_OF_TENSORS = {"is_floating_point", "is_complex", "is_signed"}  # which follow from the dtype
_BUILTINS = {
    *("abs", "all", "any", "bool", "callable", "divmod", "enumerate", "filter", "float", "int", "isinstance", "len"),
    *("list", "map", "max", "min", "pow", "range", "reversed", "round", "sorted", "str", "sum", "tuple", "zip"),
}
_IMPORT = dis.opmap["IMPORT_NAME"]
_programs = {}
_names = {}  # of a code object, by its id: (the object, names)


class _Unknown(Exception):
    """Something that may change without a trace of it."""


class Surroundings:
    """What a few functions can see: a key for it, and the tensors among it, in order."""

    __slots__ = ("_seen", "kept", "key", "tensors")

    def __init__(self, functions):
        self.tensors, self.kept, self._seen = [], [], {}  # kept: what the key has by its id
        try:
            self.key = (torch.is_grad_enabled(), *[self._describe(function) for function in functions])
        except _Unknown:
            self.key = None

    def _describe(self, thing):
        kind = type(thing)
        if kind in _UNCHANGING:
            return kind, thing
        if kind is float:
            return kind, thing or str(thing)  # 0.0 and -0.0 are equal
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor(thing)
        if kind is types.FunctionType:
            return self._function(thing)
        if kind is tuple or kind is list:
            return kind, tuple([self._describe(part) for part in thing])
        if _is_stable(thing, kind):
            return self._itself(thing)
        if kind is functools.partial:
            return kind, self._describe(thing.func), self._describe(thing.args), self._names(thing.keywords)
        if kind.__module__ == "numpy" and isinstance(thing, sys.modules["numpy"].generic):
            return kind, thing.item()
        raise _Unknown

    def _itself(self, thing):
        self.kept.append(thing)
        return id(thing)

    def _names(self, things):
        return tuple([(name, self._describe(thing)) for name, thing in things.items()])

    def _tensor(self, tensor):
        for n, known in enumerate(self.tensors):
            if known is tensor:
                return (n,)
        self.tensors.append(tensor)
        seen = tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad
        return (*seen, self._names(tensor.__dict__)) if tensor.__dict__ else seen

    def _function(self, function):
        again = self._seen.get(id(function))
        if again is not None:
            return "again", again
        self._seen[id(function)] = len(self._seen)
        code, visible = function.__code__, function.__globals__
        if function.__closure__ is None and _root(visible.get("__name__", "")) in _ROOTS:
            return self._itself(function)  # one of torch
        self.kept.append(code)
        seen = [id(code)]
        for names in (function.__kwdefaults__, function.__dict__):
            seen.append(self._names(names) if names else None)
        seen.append(self._describe(function.__defaults__))
        for cell in function.__closure__ or ():
            try:
                seen.append(self._describe(cell.cell_contents))
            except ValueError:  # not filled yet
                raise _Unknown from None
        for name in _names_of(code):
            if name in visible:
                seen.append((name, self._describe(visible[name])))
        return tuple(seen)


def _is_stable(thing, kind):
    """Whether it stays what it is: a module of torch, a type of its own, a function in C."""
    if kind is types.ModuleType:
        return thing.__name__ in _MODULES
    if isinstance(thing, type):
        return _root(thing.__module__) in _ROOTS
    if kind is types.BuiltinFunctionType:  # or a method, and then of an object that may change
        owner = thing.__self__
        if isinstance(owner, types.ModuleType):
            where = owner.__name__
        elif owner is None or isinstance(owner, type):
            where = (owner or thing).__module__ or ""
        else:
            return False
        return _root(where) in _ROOTS and not _asks(thing.__name__)
    return kind is types.MethodDescriptorType


def _root(module):
    return module.partition(".")[0]


def _asks(name):
    """Whether a thing of that name may tell of a state."""
    if name in _STATES or (name.startswith(_ASKS) and name not in _OF_TENSORS):
        return True
    return hasattr(builtins, name) and name not in _BUILTINS


def _names_of(code):
    """The names of globals (and of attributes, which does no harm). Refuses names that read a state."""
    known = _names.get(id(code))
    if known is None:
        names = _all_names(code)
        if len(_names) >= _CAPACITY:
            _names.clear()
        known = _names[id(code)] = code, None if names is None or any(map(_asks, names)) else names
    if known[1] is None:
        raise _Unknown
    return known[1]


def _all_names(code):
    """None where it imports: the names of that module are no globals."""
    if _IMPORT in code.co_code[::2]:
        return None
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _all_names(constant)
            if inner is None:
                return None
            names += inner
    return names


def find(surroundings):
    """(nodes, the places of its tensors among the surroundings', numbers, own_backward, ...), or None."""
    return None if surroundings.key is None else _programs.get(surroundings.key)


def keep(surroundings, recorder, nodes, own_backward):
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
    _programs[surroundings.key] = (nodes, slots, recorder.numbers, own_backward, surroundings.kept)
