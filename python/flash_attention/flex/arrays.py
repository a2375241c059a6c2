"""Small tensors of symbols: vectors read from captured tensors, stacked scores, and what is computed of them.

An array is a tensor of places in a list of values. What only moves elements (views, stack, cat) is done by torch on the
places; what computes is recorded element by element, a sum or any() as a chain. The text knows numbers alone.
"""

import functools
import itertools

import torch

from flash_attention.flex import derivatives, operations

MOST_ELEMENTS = 128  # of one array: each stands in the text by itself

_MOVES = {
    f"aten::{name}"
    for name in (
        "alias", "cat", "clone", "expand", "flatten", "flip", "movedim", "narrow", "permute", "repeat", "reshape",
        "roll", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze",
        "view", "_unsafe_view", "_reshape_alias",
    )
}  # fmt: skip
_FOLDS = {"sum": "add", "prod": "mul", "any": "logical_or", "all": "logical_and", "amax": "maximum", "amin": "minimum"}
_FOLDS |= {"max": "maximum", "min": "minimum", "mean": "add"}
_PRODUCTS = {"aten::dot", "aten::vdot", "aten::mv", "aten::mm", "aten::bmm"}


class Array:
    """A tensor of places in Recorder.values."""

    __slots__ = ("places",)

    def __init__(self, places):
        self.places = places


def _as_array(r, tensor):
    """The places of a tensor's elements, which it gets where it had none."""
    known = r.known(tensor)
    if isinstance(known, Array):
        return known.places
    if hasattr(known, "kind") or (known is None and tensor.dim() == 0):
        return torch.tensor(r.place(r.value(tensor)))
    tensor, indices = (known.tensor, known.indices) if known is not None else (tensor, ())
    return loads(r, tensor, [*indices, *[slice(None)] * (tensor.dim() - len(indices))])


def loads(r, tensor, indices):
    """The elements of a captured tensor at these indices, of which some are slices."""
    ranges = [range(size)[index] for index, size in zip(indices, tensor.shape, strict=True) if isinstance(index, slice)]
    shape = [len(places) for places in ranges]
    if torch.Size(shape).numel() > MOST_ELEMENTS:
        r.refuse(
            f"{torch.Size(shape).numel()} elements of a captured tensor of shape {list(tensor.shape)} are used at once; at "
            f"most {MOST_ELEMENTS} are allowed, so index more of its axes"
        )
    found = []
    for at in itertools.product(*ranges):
        rest = iter(at)
        found.append(r.place((tensor, [next(rest) if isinstance(index, slice) else index for index in indices])))
    return torch.tensor(found, dtype=torch.long).view(shape)


def symbol(r, places, dtype):
    """A tensor without memory for these places."""
    if places.dim() == 0:
        return r.symbol(r.at(int(places)), dtype)
    return r.unknown(Array(places), places.shape, dtype)


def _symbols(r, places, dtype):
    """One after the other: a load is recorded where it is used, so that few values are needed at once."""
    return (r.symbol(r.at(place), dtype) for place in places.flatten().tolist())


def _elementwise(r, record, args, kwargs):
    arrays = {n: (_as_array(r, arg), arg.dtype) for n, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    named = {n: (_as_array(r, arg), arg.dtype) for n, arg in kwargs.items() if isinstance(arg, torch.Tensor)}
    arrays |= named
    shape = torch.broadcast_shapes(*(places.shape for places, _ in arrays.values()))
    if shape.numel() > MOST_ELEMENTS:
        r.refuse(f"a tensor of shape {list(shape)} is computed; at most {MOST_ELEMENTS} elements are allowed")
    given = {n: _symbols(r, places.expand(shape), dtype) for n, (places, dtype) in arrays.items()}
    found, dtype = [], None
    for _ in range(shape.numel()):
        at = [next(given[n]) if n in given else arg for n, arg in enumerate(args)]
        result = record(r, *at, **{n: next(given[n]) if n in given else arg for n, arg in kwargs.items()})
        found.append(r.place(r.known(result)))
        dtype = result.dtype
    return symbol(r, torch.tensor(found, dtype=torch.long).view(shape), dtype)


def _chain(r, op, symbols):
    return functools.reduce(lambda x, y: operations.TABLE[f"aten::{op}"](r, x, y), symbols)


def _total(r, name, symbols):
    """The result of a fold for one row. A load is recorded at its use, unless a derivative needs all elements."""

    def record(r, *symbols):
        return chained(r, symbols)

    def chained(r, symbols):
        if name != "norm":
            return _chain(r, _FOLDS[name], symbols)
        squares = (operations.TABLE["aten::mul"](r, x, x) for x in symbols)
        return operations.TABLE["aten::sqrt"](r, _chain(r, "add", squares))

    if name not in derivatives.FOLDS or not r.is_graded():
        return chained(r, symbols)
    return r.sloped(record, derivatives.FOLDS[name], *symbols)


def _fold(r, name, x, dim=None, keepdim=False, *, dtype=None):
    places = _as_array(r, x)
    dims = [dim] if isinstance(dim, int) else list(dim or range(places.dim()))
    if name in ("max", "min") and dim is not None:
        r.refuse(f"{name} with an axis gives places, too; a{name} is allowed")
    kept = places.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)) if places.dim() > 0 else places.view(1)
    if kept.shape[-1] == 0:
        r.refuse(f"{name} of no elements")
    found = []
    for row in kept.reshape(-1, kept.shape[-1]):
        symbols = _symbols(r, row, x.dtype)
        if dtype is not None:  # before they are added up, as torch has it
            symbols = (operations.TABLE["aten::_to_copy"](r, one, dtype=dtype) for one in symbols)
        elif name in ("any", "all"):
            symbols = (r.symbol(r.value(one, "bool")) for one in symbols)
        elif name in ("sum", "prod") and x.dtype == torch.bool:
            symbols = (r.symbol(r.value(one, "int")) for one in symbols)
        total = _total(r, name, symbols)
        if name == "mean":
            total = operations.TABLE["aten::div"](r, total, row.numel())
        found.append(total)
    result = torch.tensor([r.place(r.known(one)) for one in found]).view(kept.shape[:-1])
    for axis in sorted(axis % places.dim() for axis in dims) if keepdim else ():
        result = result.unsqueeze(axis)
    return symbol(r, result, found[0].dtype)


def _product(r, x, y):
    """The product of vectors and matrices."""
    rows, columns = _as_array(r, x), _as_array(r, y)
    is_vector = rows.dim() == 1, columns.dim() == 1
    rows, columns = rows[None] if is_vector[0] else rows, columns[:, None] if is_vector[1] else columns
    pairs = torch.broadcast_tensors(rows[..., :, None, :], columns.mT[..., None, :, :])
    shape = pairs[0].shape
    if shape.numel() > MOST_ELEMENTS:
        r.refuse(f"a product of {shape.numel()} terms; at most {MOST_ELEMENTS} are allowed")
    found, multiply = [], operations.TABLE["aten::mul"]
    for left, right in zip(*(part.reshape(-1, shape[-1]) for part in pairs), strict=True):
        terms = zip(_symbols(r, left, x.dtype), _symbols(r, right, y.dtype), strict=True)
        found.append(_chain(r, "add", (multiply(r, *term) for term in terms)))
    places = torch.tensor([r.place(r.known(one)) for one in found]).view(shape[:-1])
    places = places[..., 0] if is_vector[1] else places
    return symbol(r, places[0] if is_vector[0] else places, found[0].dtype)


def _norm(r, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    if ord == 1:
        return _fold(r, "sum", _elementwise(r, operations.TABLE["aten::abs"], [x], {}), dim, keepdim, dtype=dtype)
    if ord != 2:
        r.refuse(f"a norm of order {ord}; allowed are 1 and 2")
    return _fold(r, "norm", x, dim, keepdim, dtype=dtype)


def _is_in(r, x, y, *, assume_unique=False, invert=False):
    x = symbol(r, _as_array(r, x).unsqueeze(-1), x.dtype)
    same = _elementwise(r, operations.TABLE["aten::eq"], [x, symbol(r, _as_array(r, y).flatten(), y.dtype)], {})
    found = _fold(r, "any", same, -1)
    return _elementwise(r, operations.TABLE["aten::logical_not"], [found], {}) if invert else found


def _bucket(r, x, bounds, *, out_int32=False, right=False):
    """How many of the bounds are below: the place of x among them, as they are sorted."""
    if bounds.dim() != 1:
        r.refuse(f"bounds of shape {list(bounds.shape)}; allowed is one axis")
    x = symbol(r, _as_array(r, x).unsqueeze(-1), x.dtype)
    bounds = symbol(r, _as_array(r, bounds), bounds.dtype)
    return _fold(r, "sum", _elementwise(r, operations.TABLE["aten::le" if right else "aten::lt"], [bounds, x], {}), -1)


def _search(r, bounds, x, *, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        r.refuse("searchsorted with a sorter; allowed are sorted bounds")
    return _bucket(r, x, bounds, right=right or side == "right")


_SPECIAL = {
    "aten::linalg_vector_norm": _norm,
    "aten::isin": _is_in,
    "aten::bucketize": _bucket,
    "aten::searchsorted": _search,
    "aten::embedding": lambda r, table, index, *unused: r.index(table, index),
    "aten::index": lambda r, tensor, indices: r.index(tensor, tuple(indices)),
}


def detached(r, x):
    """An array without a derivative."""
    return _elementwise(r, operations.TABLE["aten::detach"], [x], {})


def has_axes(r, things):
    """Whether there is a tensor with axes among them."""
    return any(isinstance(thing, torch.Tensor) and thing.dim() > 0 for thing in things)


def record(r, function, name, args, kwargs):
    """The result of an operation on arrays; None if the operation is another one."""
    short = name.removeprefix("aten::")
    if name in _SPECIAL:
        return _SPECIAL[name](r, *args, **kwargs)
    if name in _PRODUCTS:
        return _product(r, *args)
    if name in _MOVES:
        dtypes = []

        def place(thing):
            if isinstance(thing, torch.Tensor):
                dtypes.append(thing.dtype)
                return _as_array(r, thing)
            return [place(part) for part in thing] if isinstance(thing, list | tuple) else thing

        moved = function(*map(place, args), **kwargs)
        dtype = functools.reduce(torch.promote_types, dtypes)  # of stack and cat, which take several
        if isinstance(moved, list | tuple):
            return [symbol(r, part, dtype) for part in moved]
        return symbol(r, moved.clone(), dtype)
    if name.removesuffix("_") in _MOVES:  # torch makes matrices of vectors so
        moved = function(_as_array(r, args[0]).clone(), *args[1:], **kwargs)
        function(*args, **kwargs)
        return r.replaced(args[0], Array(moved) if moved.dim() > 0 else r.at(int(moved)))
    if short in _FOLDS and has_axes(r, args[:1]):
        return _fold(r, short, *args, **kwargs)
    if name in operations.TABLE and has_axes(r, [*args, *kwargs.values()]):
        return _elementwise(r, operations.TABLE[name], args, kwargs)
    return None
