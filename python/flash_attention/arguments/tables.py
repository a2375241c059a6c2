"""Checks of lengths, page tables and their like for torch entries: an error names argument, value and what is allowed."""

import torch

from flash_attention.arguments.names import refusal


def check_integers(name, tensor, shape, device=None):
    """Refuses all but int32 of that shape (a string as size is its name, and any number will do) on that device."""
    if not isinstance(tensor, torch.Tensor):
        raise refusal(TypeError, name, f"expected an int32 tensor, got {type(tensor).__name__}")
    wanted = f"int32 [{', '.join(map(str, shape))}]"
    if tensor.dtype != torch.int32:
        raise refusal(TypeError, name, f"got {_name(tensor.dtype)} {list(tensor.shape)}; expected {wanted}")
    fits = tensor.dim() == len(shape) and all(
        isinstance(size, str) or size == has for size, has in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise refusal(ValueError, name, f"got shape {list(tensor.shape)}; expected {wanted}")
    if device is not None and tensor.device != torch.device(device):
        raise refusal(ValueError, name, f"is on {tensor.device}; expected {torch.device(device)}")
    return tensor


def as_int32(name, tensor, shape, device=None):
    """The same for int64, too, whose entries must fit: the tensor as int32."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64:
        check_range(name, tensor, -(2**31), 2**31 - 1)
        tensor = tensor.to(torch.int32)
    return check_integers(name, tensor, shape, device)


def check_range(name, tensor, low, high):
    """Refuses entries outside of [low, high], where the host can see them without waiting for a GPU."""
    if tensor.is_cuda or not tensor.numel():
        return
    wrong = (tensor < low) | (tensor > high)
    if wrong.any():
        entry = wrong.nonzero()[0].tolist()
        raise refusal(ValueError, name, f"entry {entry} is {int(tensor[tuple(entry)])}; allowed are {low} to {high}")


def check_starts(name, starts, total, device=None):
    """int32 [batch + 1] that begins at 0, does not go down and ends at `total` or before (None = anywhere)."""
    check_integers(name, starts, ("batch + 1",), device)
    if not len(starts):
        raise refusal(ValueError, name, "got shape [0]; expected int32 [batch + 1], with at least one entry")
    if starts.is_cuda:
        return starts
    if int(starts[0]) != 0:
        raise refusal(ValueError, name, f"begins with {int(starts[0])}; allowed is 0")
    down = (starts.diff() < 0).nonzero()
    if len(down):
        entry = int(down[0]) + 1
        raise refusal(
            ValueError, name, f"entry {entry} is {int(starts[entry])}, below the one before it; they may not go down"
        )
    if total is not None and int(starts[-1]) > total:
        raise refusal(ValueError, name, f"ends with {int(starts[-1])}; allowed is at most {total}")
    return starts


def _name(dtype):
    return str(dtype).removeprefix("torch.")
