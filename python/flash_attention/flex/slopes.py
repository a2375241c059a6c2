"""A slope for each head that a score_mod works out by itself, as a tensor: ALiBi of attention-gym's kind.

    scale = torch.exp2(-((h + 1) * 8.0 / H))
    return score + (kv_idx - q_idx) * scale

The library makes its option of ALiBi where slopes are a tensor (docs/numerics.md, "Programs").
"""

import math

import torch

from flash_attention.flex.nodes import Node

__all__ = ["with_slopes"]

_OPERATIONS = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "abs": torch.abs,
    "min": torch.minimum, "max": torch.maximum, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "float": lambda x: x.to(torch.float32),
}  # fmt: skip
_MOST_TENSORS, _CAPACITY = 8, 256
_known = {}  # what with_slopes has found, None included


def with_slopes(program, heads, device):
    """The program with such a slope as one more tensor, or as it is."""
    key = (program.text, tuple(program.numbers), heads, device)
    if key not in _known:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return program  # what is computed now would belong to the graph
        if len(_known) >= _CAPACITY and not _make_room():
            return program
        with torch.inference_mode(False), torch.no_grad():  # it is kept, and a later call may want gradients
            _known[key] = None if len(program.tensors) == _MOST_TENSORS else _slopes_of(program, heads, device)
    found = _known[key]
    return program if found is None else program.with_tensor(*found)


def _make_room():
    """Forgets programs without slopes; whether there were any. Slopes stay: a graph that was captured goes on reading them,
    and nothing but this memory holds them."""
    without = [key for key, found in _known.items() if found is None]
    for key in without:
        del _known[key]
    return bool(without)


def _slopes_of(program, heads, device):
    """(the nodes that read slopes from one more tensor, slopes), or None."""
    nodes = program.nodes
    score = nodes.results["score"]
    of_heads = _values_of_heads(nodes, program.numbers, heads)
    for name in nodes.operands(score, "add") or nodes.operands(score, "sub"):
        factors = nodes.operands(name, "mul")
        slopes = [factor for factor in factors if factor in of_heads and of_heads[factor].dim() == 1]
        if len(slopes) != 1:
            continue
        tensor = f"t{len(program.tensors)}"
        product = nodes.by_name()[name]
        read = (
            Node(tensor, "tensor", ("float32", "1")),
            Node("slope", "load", (tensor, "h")),
            product._replace(arguments=tuple("slope" if factor == slopes[0] else factor for factor in factors)),
        )
        return nodes.replaced({name: read}), of_heads[slopes[0]].to(device)
    return None


def _values_of_heads(nodes, numbers, heads):
    """{name: its value for all heads, or one number if it depends on none}; what depends on more is left out."""
    known = {f"s{n}": _number(number) for n, number in enumerate(numbers)}
    known["h"] = torch.arange(heads, dtype=torch.int32)
    for node in nodes.nodes:
        if node.operation in _OPERATIONS:
            values = [known.get(argument, _literal(argument)) for argument in node.arguments]
            if all(value is not None for value in values):
                known[node.name] = _OPERATIONS[node.operation](*values)
    return known


def _literal(argument):
    """The finite number of a literal, else None."""
    try:
        number = int(argument) if argument.lstrip("-").isdigit() else float(argument)
    except ValueError:  # a name
        return None
    return _number(number) if math.isfinite(number) else None


def _number(value):
    return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else torch.int32)
