"""A slope for each head that a score_mod works out by itself, as a tensor: ALiBi of attention-gym's kind.

    scale = torch.exp2(-((h + 1) * 8.0 / H))
    return score + (kv_idx - q_idx) * scale

The library makes its option of ALiBi where slopes are a tensor (docs/numerics.md, "Programs").
"""

import re

import torch

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
            _known[key] = None if len(program.tensors) == _MOST_TENSORS else _slopes_of(*key)
    found = _known[key]
    return program if found is None else program.with_tensor(*found)


def _make_room():
    """Forgets programs without slopes; whether there were any. Slopes stay: a graph that was captured goes on reading them,
    and nothing but this memory holds them."""
    without = [key for key, found in _known.items() if found is None]
    for key in without:
        del _known[key]
    return bool(without)


def _slopes_of(text, numbers, heads, device):
    """(the text that reads slopes from one more tensor, the number of its first new line, slopes), or None."""
    lines = text.splitlines()
    made = dict(line.split(" = ") for line in lines)
    of_heads = _values_of_heads(made, numbers, heads)
    operation, *terms = made.get(made.get("score", ""), "none").split()
    for name in terms if operation in ("add", "sub") else ():
        product, *factors = made.get(name, "none").split()
        slopes = [n for n, factor in enumerate(factors) if factor in of_heads and of_heads[factor].dim() == 1]
        if product != "mul" or len(slopes) != 1:
            continue
        values = of_heads[factors[slopes[0]]]
        tensor = f"t{sum(of.startswith('tensor ') for of in made.values())}"
        factors[slopes[0]] = "slope"
        at = lines.index(f"{name} = {made[name]}")
        lines[at : at + 1] = [
            f"{tensor} = tensor float32 1",
            f"slope = load {tensor} h",
            f"{name} = mul {' '.join(factors)}",
        ]
        return "\n".join(lines), at, values.to(device)
    return None


def _values_of_heads(made, numbers, heads):
    """{name: its value for all heads, or one number where it depends on none}; what depends on more is left out."""
    known = {f"s{n}": _number(number) for n, number in enumerate(numbers)}
    known["h"] = torch.arange(heads, dtype=torch.int32)

    def value_of(name):
        if name in known or not re.match(r"-?\d", name):
            return known.get(name)
        return _number(float(name) if re.search(r"[.e]", name) else int(name))

    for name, what in made.items():
        operation, *arguments = what.split()
        values = [value_of(argument) for argument in arguments] if operation in _OPERATIONS else [None]
        if all(value is not None for value in values):
            known[name] = _OPERATIONS[operation](*values)
    return known


def _number(value):
    return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else torch.int32)
