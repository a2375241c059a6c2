"""What mask_mods show, pair by pair: for pictures, counts and tests."""

import torch
from torch.overrides import TorchFunctionMode

from flash_attention.flex.program import ProgramError, record


class _IndexByTensors(TorchFunctionMode):
    """table[h, 0] as aten.index: vmap of torch 2.9 takes the number out of h, which it then refuses."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            table, parts = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(type(part) is int or isinstance(part, torch.Tensor) for part in parts):
                return torch.ops.aten.index(table, [torch.as_tensor(part, device=table.device) for part in parts])
        return function(*args, **(kwargs or {}))


def shown(mask_mods, batches, heads, rows, keys):
    """bool [batches, heads, rows, keys], of ranges of indices. Each function sees numbers without axes, as in a kernel."""
    device = _device(mask_mods)

    def visible(b, h, i, j):
        result = torch.ones((), dtype=torch.bool, device=device)
        for mask_mod in mask_mods:
            result = result & mask_mod(b, h, i, j)
        return result

    for axis in (3, 2, 1, 0):
        visible = torch.vmap(visible, tuple(0 if n == axis else None for n in range(4)))
    indices = [torch.tensor(tuple(part), dtype=torch.long, device=device) for part in (batches, heads, rows, keys)]
    with _IndexByTensors():
        return visible(*indices)


def _device(mask_mods):
    """Where what they capture is."""
    try:
        return next((tensor.device for tensor in record(None, None, mask_mods).tensors), None)
    except ProgramError:  # no program, but perhaps a function that can be drawn
        return None


def seen_blocks(mask_mods, shape, block_size):
    """bool [batch, heads, blocks of queries, blocks of keys]: whether a block shows a pair. A head at a time."""
    batch, heads, seq_q, seq_kv = shape
    block_q, block_kv = (min(block, max(size, 1)) for block, size in zip(block_size, shape[2:], strict=True))
    found = []
    for b in range(batch):
        for h in range(heads):
            seen = shown(mask_mods, [b], [h], range(seq_q), range(seq_kv))[0, 0]
            seen = torch.nn.functional.pad(seen, (0, -seq_kv % block_kv, 0, -seq_q % block_q))
            found.append(seen.unflatten(0, (-1, block_q)).unflatten(-1, (-1, block_kv)).any(-1).any(1))
    return torch.stack(found).unflatten(0, (batch, heads))
