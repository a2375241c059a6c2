"""A score_mod and a mask_mod as one program: its nodes, the tensors and the numbers that it captures."""

import inspect
import re
import types

import torch

from flash_attention.flex import memory
from flash_attention.flex.lines import where_it_was
from flash_attention.flex.nodes import Nodes
from flash_attention.flex.recorder import ProgramError, Recorder, Value, kind_of

__all__ = ["NoProgram", "Program", "ProgramError", "record"]


class Program:
    """What is handed to the library. `tensors` are those of the functions, with their gradients' history."""

    kept = None  # where the masks of the call are kept: _core.KeptMasks

    def __init__(self, nodes, tensors, numbers, own_backward=""):
        self.nodes, self.text, self.tensors, self.numbers = nodes, nodes.text, tensors, numbers
        self._own_backward = own_backward

    @property
    def has_score(self):
        """Whether it changes scores: only then what it captures has gradients."""
        return "score" in self.nodes.results

    def __repr__(self):
        return f"Program of {len(self.tensors)} tensors and {len(self.numbers)} numbers:\n{self.text}"

    def with_tensor(self, nodes, tensor):
        """The program of these nodes, which read one more tensor."""
        return Program(nodes, [*self.tensors, tensor], self.numbers, self._own_backward)

    def arguments(self, tensors, gradients=None):
        """As the binding takes it."""
        captured = (self.text, tuple(tensors), self.numbers)
        return captured if gradients is None else (*captured, tuple(gradients))

    def check_gradients(self):
        """Refuses gradients where they would not be the user's."""
        if self._own_backward:
            raise ProgramError(
                f"score_mod: {self._own_backward}\n  a torch.autograd.Function, whose own backward is not called; allowed "
                "are operations by themselves, with detach() for what has no derivative, and calls without gradients"
            )

    def check_ints(self):
        """Refuses ints of 64 bits that do not fit into 32, of which kernels read the low ones. On a CPU, where it costs
        little to look."""
        for n, tensor in enumerate(self.tensors):
            if tensor.dtype is not torch.int64 or tensor.device.type != "cpu" or tensor.numel() == 0:
                continue
            for value in torch.aminmax(tensor):
                if not -(2**31) <= value.item() < 2**31:
                    loads = (node for node in self.nodes.nodes if node.operation == "load")
                    place = next(node.place for node in loads if node.arguments[0] == f"t{n}")
                    raise ProgramError(
                        f"{place}\n  a captured tensor holds {value.item()}, which does not fit into 32 bits; "
                        "torch.unique(tensor, return_inverse=True)[1] numbers its values anew"
                    )

    def explain(self, error):
        """The error of the library with the line of the user's function, where it names one of the text."""
        found = re.search(r"program: line (\d+)", str(error))
        if found is None:
            return error
        return ProgramError(f"{self.nodes.place_of_line(int(found.group(1)))}\n  {error}")


class NoProgram(Program):
    """The program of a call whose prepared masks are all data: none."""

    def __init__(self):
        super().__init__(Nodes((), {}), [], ())

    def arguments(self, tensors, gradients=None):
        return None


def record(score_mod=None, mask_mod=None, extra=()):
    """Runs both functions once on symbols, or remembers it. `extra`: more mask_mods, all of which must show a key."""
    masks = [*extra, *([] if mask_mod is None else [mask_mod])]
    surroundings = memory.Surroundings([score_mod, *masks])
    known = memory.find(surroundings)
    if known is not None:
        nodes, slots, *rest = known[:-1]
        return Program(nodes, [surroundings.tensors[n] for n in slots], *rest)
    recorder = Recorder()
    b, h, i, j = (recorder.symbol(Value(name, "int")) for name in "bhij")
    results = {}
    if score_mod is not None:
        recorder.constants = _constants(score_mod)
        score = _called(recorder, "score_mod", score_mod, recorder.symbol(Value("score", "float")), b, h, i, j)
        results["score"] = _result(recorder, "score_mod", score_mod, score, "float").name
    own_backward = recorder.own_backward  # what a mask does has no derivative
    visible = None
    for mask in masks:
        recorder.constants, recorder.with_slopes = _constants(mask), False
        shown = _result(recorder, "mask_mod", mask, _called(recorder, "mask_mod", mask, b, h, i, j), "bool")
        visible = shown if visible is None else recorder.emit("bool", "and", visible.name, shown.name)
    if visible is not None:
        results["visible"] = visible.name
    if not results:
        return None
    nodes = _with_literal_cap(Nodes([*recorder.declarations, *recorder.operations], results), recorder.numbers)
    memory.keep(surroundings, recorder, nodes, own_backward)
    return Program(nodes, recorder.tensors, recorder.numbers, own_backward)


def _with_literal_cap(nodes, numbers):
    """A soft cap, c * tanh(score / c), with c in the text: the library makes its option of it, for which no kernel is
    compiled. Other captured numbers stay outside, so that a program is compiled once for all of them."""
    score = nodes.results.get("score")
    bent, factor = nodes.operands(score, "mul") or (None, None)
    (inner,) = nodes.operands(bent, "tanh") or (None,)
    of, divisor = nodes.operands(inner, "div") or (None, None)
    captured = {f"s{n}": float(number) for n, number in enumerate(numbers)}
    if of != "score" or factor not in captured or captured.get(divisor) != captured[factor]:
        return nodes
    cap, made = repr(captured[factor]), nodes.by_name()
    part, product = made[inner]._replace(arguments=("score", cap)), made[score]._replace(arguments=(bent, cap))
    return nodes.replaced({inner: (part,), score: (product,)})


def _called(recorder, name, function, *arguments):
    if not callable(function):
        raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
    try:
        return recorder.run(function, *arguments)
    except ProgramError as error:
        raise ProgramError(f"{name}: {error}") from None
    except Exception as error:
        if taken := _other_arguments(function, arguments):
            expected = f"expected a function of {_ARGUMENTS[name]}, got one of {taken}"
            raise ProgramError(f"{name}: {_place(function)}\n  {expected}") from None
        # Raised by the function, or by torch for what it does with tensors without axes.
        place = where_it_was(error.__traceback__) or _place(function)
        raise ProgramError(f"{name}: {place}\n  {type(error).__name__}: {error}") from error


_ARGUMENTS = {"score_mod": "(score, b, h, q_idx, kv_idx)", "mask_mod": "(b, h, q_idx, kv_idx)"}


def _other_arguments(function, given):
    """The arguments of a function that does not take those that are given; "" if it does, or says nothing."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C
        return ""
    try:
        signature.bind(*given)
    except TypeError:
        return str(signature)
    return ""


def _result(recorder, name, function, result, kind):
    """The value that the function gave; refuses another type."""
    if isinstance(result, bool) and kind == "bool":
        return recorder.number(result, "bool")
    value = recorder.known(result) if isinstance(result, torch.Tensor) else None
    if isinstance(value, Value) and value.kind == kind:
        return value
    if isinstance(result, torch.Tensor) and value is None and result.dim() == 0 and kind_of(result.dtype) == kind:
        return recorder.value(result)
    got = type(result).__name__
    if isinstance(result, torch.Tensor):
        got = f"a tensor of dtype {result.dtype} and shape {list(result.shape)}"
    raise ProgramError(
        f"{name} ({_place(function)}) returned {got}; expected is a {kind} without axes, made of its arguments"
    )


def _place(function):
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}" if hasattr(function, "__code__") else "?"


def _constants(function):
    """The numbers in the source of a function and of those that it can see: they stay literals in the text."""
    numbers, open_, seen = set(), [function], set()
    while open_:
        thing = open_.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, types.MethodType):
            open_.append(thing.__func__)
        elif isinstance(thing, types.FunctionType):
            open_.append(thing.__code__)
            for cell in thing.__closure__ or ():
                try:
                    open_.append(cell.cell_contents)
                except ValueError:  # not filled yet
                    continue
            open_.extend(
                value
                for name in thing.__code__.co_names
                if isinstance(value := thing.__globals__.get(name), types.FunctionType)
            )
        elif isinstance(thing, types.CodeType):
            for constant in thing.co_consts:
                if isinstance(constant, types.CodeType):
                    open_.append(constant)
                elif isinstance(constant, int | float) and not isinstance(constant, bool):
                    numbers.add(constant)
        elif isinstance(thing, list | tuple):
            open_.extend(part for part in thing if callable(part))
        elif hasattr(thing, "func"):  # functools.partial
            open_.append(thing.func)
    return numbers
