"""How a recorder sees what a function does: two modes of torch."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attention.flex import arrays, operations

# Attributes of a captured tensor: reads that no operation shows; then those that memory.py knows or that follow from
# operations.
_READS = {"data_ptr", "storage", "untyped_storage", "storage_offset", "stride", "is_contiguous"}
_DESCRIPTIONS = {"shape", "dtype", "device", "ndim", "requires_grad", "T", "mT"}
_NUMBERS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "__len__", "numpy"}
_TENSORS_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)


class Functions(TorchFunctionMode):
    """Sees indexing, what would need the value of a symbol, and tensors made of numbers."""

    def __init__(self, recorder):
        self.recorder = recorder
        super().__init__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        recorder = self.recorder
        name = getattr(function, "__name__", "")
        if function is torch.Tensor.__getitem__:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if not isinstance(recorder.known(args[0]), arrays.Array):
                if recorder.is_symbolic((args[0], *parts)):
                    return recorder.held(recorder.index(args[0], args[1]))
            elif recorder.is_symbolic(parts):
                recorder.refuse("a tensor of computed values is indexed by one; allowed are ints and slices there")
        elif name in _NUMBERS and args and not recorder.is_symbolic(args[:1]):
            recorder.only_symbols = False  # what a captured tensor holds now; tolist() and numpy() are no operations
        elif name == "__len__" and args[0].dim() > 0:
            return args[0].shape[0]
        elif name in _NUMBERS and args:
            what = "branches on" if name == "__bool__" else f"asks for the value ({name}) of"
            recorder.refuse(
                f"the function {what} a score or an index, which is known in the kernel alone; torch.where chooses between "
                "two values, and & | ~ combine conditions"
            )
        elif function is torch.Tensor.__setitem__:
            recorder.refuse("the function writes into a tensor; a program only reads")
        elif function is torch.Tensor.to and not recorder.is_symbolic(args[:1]):
            return _moved(recorder, *args, **(kwargs or {}))
        elif function in _TENSORS_OF_NUMBERS or function is torch.Tensor.new_tensor:
            made = _of_number(recorder, function, args, kwargs or {})
            if made is not None:
                return made
        elif function is torch.Tensor.view_as and args[0] is args[1] and recorder.is_without_grad():
            recorder.note_own_backward()  # so torch copies what a function of autograd returns as it was given
        elif name in _READS or (name == "__get__" and function.__self__.__name__ not in _DESCRIPTIONS):
            recorder.only_symbols = False
        return function(*args, **(kwargs or {}))


def _is_meta(thing):
    return thing is not None and torch.device(thing).type == "meta"


def _moved(recorder, tensor, *args, **kwargs):
    """A captured tensor to the device or the dtype of a symbol: where a symbol is, every tensor is."""
    dtype, kept = kwargs.pop("dtype", None), []
    for thing in (*args, *(kwargs.pop(name) for name in ("device", "other") if name in kwargs)):
        if isinstance(thing, torch.dtype) or (isinstance(thing, torch.Tensor) and recorder.is_symbolic((thing,))):
            dtype = thing if isinstance(thing, torch.dtype) else thing.dtype
        elif isinstance(thing, bool | torch.Tensor) or not _is_meta(thing):
            kept.append(thing)
    if dtype is not None:
        kwargs["dtype"] = dtype
    return tensor.to(*kept, **kwargs) if kept or dtype is not None else tensor


def _of_number(recorder, function, args, kwargs):
    """torch.tensor(0.5, device=score.device) and its kin; None where it is another tensor."""
    if function is torch.Tensor.new_tensor:
        is_ours, data = recorder.is_symbolic(args[:1]), args[1] if len(args) > 1 else None
    else:
        is_ours, data = _is_meta(kwargs.get("device")), args[0] if args else None
    if not is_ours or not isinstance(data, bool | int | float):
        return None
    return recorder.literal(data, kwargs.get("dtype"))


class Operations(TorchDispatchMode):
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
        on_meta = "device" in kwargs and _is_meta(kwargs["device"] or "cpu")
        record = operations.TABLE.get(name) or operations.in_place(name)
        if not recorder.is_symbolic(things):
            if record is None or not on_meta:
                recorder.only_symbols = (
                    recorder.only_symbols and name == "aten::empty" and on_meta
                )  # one of our own symbols
                return function(*args, **kwargs)
        else:
            found = arrays.record(recorder, function, name, args, kwargs)
            if found is not None:
                return recorder.held(found)
        if record is None:
            recorder.refuse(f"the operation {name} is not allowed; allowed are {operations.ALLOWED}")
        return recorder.held(record(recorder, *args, **kwargs))
