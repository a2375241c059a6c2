"""Runs a score_mod or a mask_mod once on symbols and writes down what it does, as nodes.

The symbols are tensors without memory and without axes. Two modes of torch see every call that the function makes: one sees
indexing and conversions to Python numbers, the other the operations below. Nothing is executed but what the user wrote, and
of that only what does not depend on a symbol.
"""

import math
import struct

import torch

from flash_attention.flex import arrays, modes, operations
from flash_attention.flex.lines import in_a_function_of_autograd, where_is_user
from flash_attention.flex.nodes import Node

MOST_TENSORS, MOST_SCALARS, MOST_AXES = 8, 16, 4
_ELEMENTS = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
_READ_AS = {torch.float64: torch.float32} | dict.fromkeys((torch.uint8, torch.int8, torch.int16), torch.int32)
_ALLOWED_ELEMENTS = "floats of 16, 32 and 64 bits, ints of 8 (also unsigned), 16, 32 and 64 bits, and bool"
_ALWAYS_LITERAL = (0, 1, -1, 2)
_LARGEST = 3.4028234663852886e38
_WITHOUT_SLOPE = {"detach", "floor"}


class ProgramError(ValueError):
    """A score_mod or mask_mod that cannot be recorded: names the line and what is allowed."""


def kind_of(dtype):
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def _single(value):
    """The nearest number of 32 bits, as the kernels have it; finite ones stay finite."""
    if value != value or abs(value) == math.inf:
        return value
    return struct.unpack("f", struct.pack("f", max(-_LARGEST, min(_LARGEST, value))))[0]


class Value:
    """A value of the program: its name in the text and 'bool', 'int' or 'float'."""

    __slots__ = ("kind", "name")

    def __init__(self, name, kind):
        self.name, self.kind = name, kind


class Partial:
    """A captured tensor of which some leading axes are indexed."""

    __slots__ = ("indices", "tensor")

    def __init__(self, tensor, indices):
        self.tensor, self.indices = tensor, indices


class Recorder:
    """The nodes of one program in the making. Both functions of a program are recorded by one."""

    def __init__(self):
        self.declarations, self.operations = [], []
        self.tensors, self.numbers = [], []
        self.only_symbols = True  # nothing was computed but what the nodes do
        self.own_backward = ""  # the line of a torch.autograd.Function, whose backward a program does not call
        self.constants = set()  # numbers that stand in the source: they stay literals
        self.all_literal = False
        self.with_slopes = True  # whether derivatives are written down
        self._is_graded = torch.is_grad_enabled()
        self._varying = {"score"}  # names of floats that something may be differentiated by
        self._converted = {}  # id of a tensor -> the one that is read in its place
        self._known = {}  # id of a tensor -> Value or Partial
        self._keep = []  # so that no id is used twice
        self._memo = {}
        self.values = []  # that are elements of arrays

    # What the operations use.

    def refuse(self, what):
        raise ProgramError(f"{where_is_user()}\n  {what}")

    def emit(self, kind, op, *names):
        """The node 'name = op names', once for the same operation on the same values."""
        key = (op, *names)
        if key not in self._memo:
            value = self._memo[key] = Value(f"v{len(self.operations)}", kind)
            self.operations.append(Node(value.name, op, names, where_is_user()))
            if kind == "float" and op not in _WITHOUT_SLOPE and not self._varying.isdisjoint(names):
                self._varying.add(value.name)
        return self._memo[key]

    def named(self, name):
        """The float of that name."""
        return Value(name, "float")

    def number(self, value, kind):
        """A Python number: a literal where the source says it, else an argument, so that another value compiles nothing."""
        if kind == "bool":
            return Value("true" if value else "false", "bool")
        given, value = value, float(value) if kind == "float" else int(value)
        if kind == "int" and not -(2**31) <= value < 2**31:
            self.refuse(f"the int {value} does not fit into 32 bits")
        if kind == "float":
            value = _single(value)
        literal = self.all_literal or given in _ALWAYS_LITERAL or given in self.constants or not math.isfinite(value)
        if literal or len(self.numbers) == MOST_SCALARS:
            return Value(repr(value), kind)
        self.numbers.append(value)
        name = f"s{len(self.numbers) - 1}"
        self.declarations.append(Node(name, "scalar", (kind,)))
        return Value(name, kind)

    def converted(self, value, kind):
        if value.kind == kind:
            return value
        if kind == "bool":
            return self.emit("bool", "ne", value.name, self.number(0, value.kind).name)
        return self.emit(kind, kind, value.name)

    def value(self, thing, kind=None):
        """The value of an operation's argument: a symbol, a number, or a captured tensor without axes."""
        if isinstance(thing, bool | int | float):
            natural = "bool" if isinstance(thing, bool) else "int" if isinstance(thing, int) else "float"
            if natural != "bool" and kind in ("int", "float") and not (kind == "int" and natural == "float"):
                return self.number(thing, kind)
            value = self.number(thing, natural)
        elif isinstance(thing, torch.Tensor):
            value = self.known(thing)
            if value is None:
                value = self._captured(thing)
            elif not isinstance(value, Value):
                self.refuse(f"a tensor of shape {list(thing.shape)} stands where a number must")
        else:
            self.refuse(f"an argument of type {type(thing).__name__}; allowed are tensors without axes and numbers")
        return value if kind is None else self.converted(value, kind)

    def kind(self, thing):
        if isinstance(thing, torch.Tensor):
            return kind_of(thing.dtype)
        return "bool" if isinstance(thing, bool) else "int" if isinstance(thing, int) else "float"

    # Symbols.

    def known(self, tensor):
        return self._known.get(id(tensor))

    def unknown(self, what, shape, dtype):
        """A tensor without memory that stands for a Value, a Partial or an Array."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._known[id(tensor)] = what
        self._keep.append(tensor)
        return tensor

    def symbol(self, value, dtype=None):
        return self.unknown(
            value, (), dtype or {"bool": torch.bool, "int": torch.int32, "float": torch.float32}[value.kind]
        )

    def literal(self, number, dtype=None):
        """A tensor without axes of a number."""
        return self.symbol(self.value(number, None if dtype is None else kind_of(dtype)), dtype)

    def place(self, value):
        """The number of a value in `values`, or of a captured tensor with indices: a load that is not recorded yet."""
        self.values.append(value)
        return len(self.values) - 1

    def at(self, place):
        if isinstance(self.values[place], tuple):
            self.values[place] = self.load(*self.values[place])
        return self.values[place]

    def replace(self, symbol, value):
        """From here on the symbol is another value."""
        if not isinstance(self.known(symbol), Value):
            self.refuse("the function writes into a tensor; a program only reads")
        self.replaced(symbol, value)

    def replaced(self, symbol, what):
        self._known[id(symbol)] = what
        return symbol

    def _captured(self, tensor):
        """A tensor without axes that the function has from elsewhere."""
        if tensor.dim() != 0:
            self.refuse(f"a captured tensor of shape {list(tensor.shape)} is used whole; index all of its axes")
        if tensor.device.type == "cpu" and not tensor.requires_grad:
            self.only_symbols = False
            return self.number(tensor.item(), kind_of(tensor.dtype))
        return self.load(tensor, ())

    def load(self, tensor, indices):
        name = self._tensor_name(self._readable(tensor))
        names = [self.converted(self.value(index), "int").name for index in indices]
        value = self.emit(kind_of(tensor.dtype), "load", name, *names)
        if tensor.requires_grad:
            self._varying.add(value.name)
        return value

    def _readable(self, tensor):
        """A tensor of a dtype that kernels do not read, as one that they do."""
        if tensor.dtype not in _READ_AS:
            return tensor
        if id(tensor) not in self._converted:
            self._converted[id(tensor)] = tensor.to(_READ_AS[tensor.dtype])
            self.only_symbols = False
        return self._converted[id(tensor)]

    def _tensor_name(self, tensor):
        for n, known in enumerate(self.tensors):
            if known is tensor:
                return f"t{n}"
        if tensor.dtype not in _ELEMENTS:
            self.refuse(f"a captured tensor of dtype {tensor.dtype}; allowed are {_ALLOWED_ELEMENTS}")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            self.refuse(
                "a captured tensor without memory of its own; allowed are plain strided tensors (what is made on the "
                "device of a score or an index has no memory: make it outside of the function)"
            )
        if tensor.dim() > MOST_AXES:
            self.refuse(f"a captured tensor of {tensor.dim()} axes; at most {MOST_AXES} are allowed")
        if len(self.tensors) == MOST_TENSORS:
            self.refuse(f"more than {MOST_TENSORS} captured tensors")
        self.tensors.append(tensor)
        name = f"t{len(self.tensors) - 1}"
        self.declarations.append(Node(name, "tensor", (_ELEMENTS[tensor.dtype], str(tensor.dim()))))
        return name

    def index(self, tensor, index):
        """tensor[index] with a symbol in the index."""
        indices = index if isinstance(index, tuple) else (index,)
        for part in indices:
            if not isinstance(part, int | slice | torch.Tensor | type(...)) or isinstance(part, bool):
                self.refuse(
                    f"an index of type {type(part).__name__}; allowed are ints, slices and b, h, i, j or what comes of them"
                )
            if isinstance(part, torch.Tensor) and (kind_of(part.dtype) != "int" or part.dim() > 0):
                self.refuse(f"an index of dtype {part.dtype} and shape {list(part.shape)}; allowed are ints without axes")
        known = self.known(tensor)
        if isinstance(known, Value):
            self.refuse("a score or an index has no axes and cannot be indexed")
        if known is not None:
            tensor, indices = known.tensor, (*known.indices, *indices)
        if any(part is ... for part in indices):
            at = next(n for n, part in enumerate(indices) if part is ...)
            indices = (*indices[:at], *[slice(None)] * (tensor.dim() - len(indices) + 1), *indices[at + 1 :])
        while indices and isinstance(indices[-1], slice) and indices[-1] == slice(None):
            indices = indices[:-1]
        if len(indices) > tensor.dim():
            self.refuse(f"{len(indices)} indices for a captured tensor of shape {list(tensor.shape)}")
        if any(isinstance(part, slice) for part in indices):
            places = arrays.loads(self, tensor, [*indices, *[slice(None)] * (tensor.dim() - len(indices))])
            return arrays.symbol(self, places, tensor.dtype)
        if len(indices) == tensor.dim():
            return self.symbol(self.load(tensor, indices), tensor.dtype)
        return self.unknown(Partial(tensor, indices), tensor.shape[len(indices) :], tensor.dtype)

    def is_symbolic(self, things):
        return any(isinstance(thing, torch.Tensor) and id(thing) in self._known for thing in things)

    def is_without_grad(self):
        """Whether it is the function, or torch below it, that has turned gradients off."""
        return self._is_graded and not torch.is_grad_enabled()

    def note_own_backward(self):
        self.own_backward = self.own_backward or where_is_user()

    def held(self, result):
        """The result of an operation, or itself without a derivative where the function has no_grad."""
        if not self.is_without_grad():
            return result
        if in_a_function_of_autograd(Recorder.run):
            self.note_own_backward()
            return result
        if isinstance(result, list | tuple):
            return [self.held(part) for part in result]
        known = self.known(result)
        if isinstance(known, arrays.Array):
            return arrays.detached(self, result)
        return operations.detached(self, result) if isinstance(known, Value) else result

    def is_graded(self):
        """Whether derivatives may be asked for."""
        return self.with_slopes and torch.is_grad_enabled()

    def varies(self, thing):
        """Whether a derivative by this argument of an operation may be asked for."""
        if not self.is_graded() or not isinstance(thing, torch.Tensor):
            return False
        known = self.known(thing)
        return thing.requires_grad if known is None else isinstance(known, Value) and known.name in self._varying

    def sloped(self, record, slopes, *arguments, **named):
        """What `record` records, with the derivatives that slopes(result, *arguments) gives in the place of its own."""
        if not any(map(self.varies, arguments)):
            return record(self, *arguments, **named)
        varying = [self.varies(argument) for argument in arguments]
        self.with_slopes = False  # of what the value and its derivatives are made of
        try:
            results = record(self, *arguments, **named)
            result = results[0] if isinstance(results, tuple) else results
            made = self.run_ours(slopes, result, *arguments, **named)
        finally:
            self.with_slopes = True
        value = self.emit("float", "detach", self.value(result, "float").name)
        for argument, slope, is_varying in zip(arguments, made, varying, strict=False):
            if is_varying and slope is not None:
                names = (self.value(thing, "float").name for thing in (argument, slope))
                value = self.emit("float", "slope", value.name, *names)
        sloped = self.symbol(value, result.dtype)
        return (sloped, *results[1:]) if isinstance(results, tuple) else sloped

    def run(self, function, *arguments, **named):
        with modes.Operations(self), modes.Functions(self):
            return function(*arguments, **named)

    def run_ours(self, function, *arguments, **named):
        """A formula of ours: what is in it is no argument of the user's."""
        before, self.all_literal = self.all_literal, True
        try:
            return self.run(function, *arguments, **named)
        finally:
            self.all_literal = before
