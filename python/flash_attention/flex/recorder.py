"""Runs a score_mod or a mask_mod once on symbols and writes down what it does, as the text of docs/numerics.md.

The symbols are tensors without memory and without axes. Two modes of torch see every call that the function makes: one sees
indexing and conversions to Python numbers, the other the operations below. Nothing is executed but what the user wrote, and
of that only what does not depend on a symbol.
"""

import linecache
import math
import os
import struct
import sys

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attention.flex import operations

MOST_TENSORS, MOST_SCALARS, MOST_AXES = 8, 16, 4
_ELEMENTS = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
_ALLOWED_ELEMENTS = "float32, float16, bfloat16, int32, int64 and bool"
_ALWAYS_LITERAL = (0, 1, -1, 2)
_LARGEST = 3.4028234663852886e38
_PLACES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


class ProgramError(ValueError):
    """A score_mod or mask_mod that cannot be recorded: names the line and what is allowed."""


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
    """The text of one program in the making. Both functions of a program are recorded by one."""

    def __init__(self):
        self.declarations, self.lines, self.places = [], [], []
        self.tensors, self.numbers = [], []
        self.only_symbols = True  # nothing was computed but what is in the text
        self.constants = set()  # numbers that stand in the source: they stay literals
        self._known = {}  # id of a tensor -> Value or Partial
        self._keep = []  # so that no id is used twice
        self._memo = {}

    # What the operations use.

    def refuse(self, what):
        raise ProgramError(f"{where_is_user()}\n  {what}")

    def emit(self, kind, op, *names):
        """A line 'name = op names', once for the same operation on the same values."""
        key = (op, *names)
        if key not in self._memo:
            self._memo[key] = Value(f"v{len(self.lines)}", kind)
            self.lines.append(f"v{len(self.lines)} = {' '.join(key)}")
            self.places.append(where_is_user())
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
        literal = given in _ALWAYS_LITERAL or given in self.constants or not math.isfinite(value)
        if literal or len(self.numbers) == MOST_SCALARS:
            return Value(repr(value), kind)
        self.numbers.append(value)
        name = f"s{len(self.numbers) - 1}"
        self.declarations.append(f"{name} = scalar {kind}")
        return Value(name, kind)

    def converted(self, value, kind):
        if value.kind == kind:
            return value
        if kind == "bool":
            return self.emit("bool", "ne", value.name, self.number(0, value.kind).name)
        return self.emit(kind, kind, value.name)

    def value(self, thing, kind=None):
        """Of an argument of an operation: a symbol, a number, or a captured tensor without axes."""
        if isinstance(thing, bool | int | float):
            natural = "bool" if isinstance(thing, bool) else "int" if isinstance(thing, int) else "float"
            if natural != "bool" and kind in ("int", "float") and not (kind == "int" and natural == "float"):
                return self.number(thing, kind)
            value = self.number(thing, natural)
        elif isinstance(thing, torch.Tensor):
            value = self.known(thing)
            if value is None:
                value = self._captured(thing)
            elif isinstance(value, Partial):
                self.refuse(
                    f"a captured tensor of shape {list(value.tensor.shape)} is read with {len(value.indices)} of "
                    f"{value.tensor.dim()} indices; all axes must be indexed"
                )
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

    def symbol(self, value, dtype=None):
        dtype = dtype or {"bool": torch.bool, "int": torch.int32, "float": torch.float32}[value.kind]
        tensor = torch.empty((), dtype=dtype, device="meta")
        self._known[id(tensor)] = value
        self._keep.append(tensor)
        return tensor

    def replace(self, symbol, value):
        """From here on the symbol is another value."""
        if not isinstance(self.known(symbol), Value):
            self.refuse("the function writes into a tensor; a program only reads")
        self._known[id(symbol)] = value

    def _captured(self, tensor):
        """A tensor without axes that the function has from elsewhere."""
        if tensor.dim() != 0:
            self.refuse(f"a captured tensor of shape {list(tensor.shape)} is used whole; index all of its axes")
        if tensor.device.type == "cpu" and not tensor.requires_grad:
            self.only_symbols = False
            return self.number(tensor.item(), kind_of(tensor.dtype))
        return self.load(tensor, ())

    def load(self, tensor, indices):
        name = self._tensor_name(tensor)
        names = [self.converted(self.value(index), "int").name for index in indices]
        return self.emit(kind_of(tensor.dtype), "load", name, *names)

    def _tensor_name(self, tensor):
        for n, known in enumerate(self.tensors):
            if known is tensor:
                return f"t{n}"
        if tensor.dtype not in _ELEMENTS:
            self.refuse(f"a captured tensor of dtype {tensor.dtype}; allowed are {_ALLOWED_ELEMENTS}")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            self.refuse("a captured tensor without memory of its own; allowed are plain strided tensors")
        if tensor.dim() > MOST_AXES:
            self.refuse(f"a captured tensor of {tensor.dim()} axes; at most {MOST_AXES} are allowed")
        if len(self.tensors) == MOST_TENSORS:
            self.refuse(f"more than {MOST_TENSORS} captured tensors")
        self.tensors.append(tensor)
        self.declarations.append(f"t{len(self.tensors) - 1} = tensor {_ELEMENTS[tensor.dtype]} {tensor.dim()}")
        return f"t{len(self.tensors) - 1}"

    def index(self, tensor, index):
        """tensor[index] with a symbol in the index."""
        indices = index if isinstance(index, tuple) else (index,)
        for part in indices:
            if not isinstance(part, int | torch.Tensor) or isinstance(part, bool):
                self.refuse(
                    f"an index of type {type(part).__name__}; allowed are ints and b, h, i, j or what comes of them"
                )
            if isinstance(part, torch.Tensor) and kind_of(part.dtype) != "int":
                self.refuse(f"an index of dtype {part.dtype}; allowed are ints")
        known = self.known(tensor)
        if isinstance(known, Value):
            self.refuse("a score or an index has no axes and cannot be indexed")
        if known is not None:
            tensor, indices = known.tensor, (*known.indices, *indices)
        if len(indices) > tensor.dim():
            self.refuse(f"{len(indices)} indices for a captured tensor of shape {list(tensor.shape)}")
        if len(indices) == tensor.dim():
            return self.symbol(self.load(tensor, indices), tensor.dtype)
        rest = torch.empty(tensor.shape[len(indices) :], dtype=tensor.dtype, device="meta")
        self._known[id(rest)] = Partial(tensor, indices)
        self._keep.append(rest)
        return rest

    def element(self, vector, n):
        """The name of element n of what is left of a captured tensor, as a float."""
        known = self.known(vector)
        tensor, indices = (known.tensor, known.indices) if isinstance(known, Partial) else (vector, ())
        names = [self.converted(self.value(index), "int").name for index in indices]
        loaded = self.emit(kind_of(tensor.dtype), "load", self._tensor_name(tensor), *names, repr(n))
        return self.converted(loaded, "float").name

    def is_symbolic(self, things):
        return any(isinstance(thing, torch.Tensor) and id(thing) in self._known for thing in things)

    def run(self, function, *arguments):
        with _Operations(self), _Functions(self):
            return function(*arguments)


# Of a captured tensor: what no operation tells of, and what memory.py knows or operations follow from.
_READS = {"data_ptr", "storage", "untyped_storage", "storage_offset", "stride", "is_contiguous"}
_DESCRIPTIONS = {"shape", "dtype", "device", "ndim", "requires_grad", "T", "mT"}
_NUMBERS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "__len__", "__iter__", "numpy"}


class _Functions(TorchFunctionMode):
    """Sees indexing, and what would need the value of a symbol."""

    def __init__(self, recorder):
        self.recorder = recorder
        super().__init__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        recorder = self.recorder
        name = getattr(function, "__name__", "")
        if function is torch.Tensor.__getitem__:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if recorder.is_symbolic((args[0], *parts)):
                return recorder.index(args[0], args[1])
        elif name in _NUMBERS and args and not recorder.is_symbolic(args[:1]):
            recorder.only_symbols = False  # what a captured tensor holds now; tolist() and numpy() are no operations
        elif name in _NUMBERS and args:
            what = "branches on" if name == "__bool__" else f"asks for the value ({name}) of"
            recorder.refuse(
                f"the function {what} a score or an index, which is known in the kernel alone; torch.where chooses between "
                "two values, and & | ~ combine conditions"
            )
        elif function is torch.Tensor.__setitem__:
            recorder.refuse("the function writes into a tensor; a program only reads")
        elif name in _READS or (name == "__get__" and function.__self__.__name__ not in _DESCRIPTIONS):
            recorder.only_symbols = False  # what no operation tells of
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees every operation, and writes down those on symbols."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # untraced() has seen to it, without an import of torch._dynamo

    def __init__(self, recorder):
        self.recorder = recorder
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recorder = self.recorder
        things = [*args, *kwargs.values()]
        for thing in args:
            if isinstance(thing, list | tuple):
                things.extend(thing)
        name = function._schema.name
        on_meta = "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "meta"
        record = operations.TABLE.get(name) or operations.in_place(name)
        if not recorder.is_symbolic(things) and (record is None or not on_meta):
            recorder.only_symbols = recorder.only_symbols and name == "aten::empty" and on_meta  # one of our own symbols
            return function(*args, **kwargs)
        if record is None:
            recorder.refuse(f"the operation {name} is not allowed; allowed are {operations.ALLOWED}")
        return record(recorder, *args, **kwargs)
