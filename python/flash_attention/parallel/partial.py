"""Partial results of blocks, merged in float32 in the order in which they are added.

On a GPU they wait until there are four, which one kernel merges; elsewhere each is merged at once. `together` is the
context in which parts of several streams are merged: TwoStreams.together.
"""

from contextlib import nullcontext
from functools import cache

import torch

_RUN = 256


@cache
def _fused():
    """The module of fused kernels; None without Triton, or if Triton cannot build a kernel for this GPU."""
    try:
        from flash_attention.parallel import fused

        probe = torch.zeros(1, 1, 1, 8, device="cuda")
        fused.merge([((0, 1), probe, None)], 1, torch.float32, False)
    except Exception:  # Triton raises all kinds of errors for a missing compiler or an unknown GPU
        return None
    return fused


def waits(tensor):
    """Whether parts like this one are kept until there are several, and not merged at once."""
    return _kernels(tensor) is not None


def _kernels(tensor):
    return _fused() if tensor.is_cuda and tensor.shape[-1] <= 256 else None


class States:
    """Merges parts, each with out and lse of some rows, to out and lse of all rows."""

    def __init__(self, q, head_dim_v, together=nullcontext):
        batch, self.rows, heads, _ = q.shape
        self.q, self.shape, self.lse_shape = q, (batch, self.rows, heads, head_dim_v), (batch, heads, self.rows)
        self.kernels, self.together = _kernels(q), together
        self.waiting = []
        self.out = self.lse = None

    def add(self, rows, out, lse):
        if self.kernels is not None:
            if len(self.waiting) == self.kernels.PARTS:
                with self.together():
                    self._fold(torch.float32)
            self.waiting.append((rows, out, lse))
        elif self.out is None and rows == (0, self.rows):
            self.out, self.lse = out, lse
        else:
            self._merge(slice(*rows), out, lse)

    def _fold(self, dtype):
        out, lse = self.kernels.merge(self.waiting, self.rows, dtype, True)
        self.waiting = [((0, self.rows), out, lse)]

    def _merge(self, rows, out, lse):
        if self.out is None:
            self.out = self.q.new_zeros(self.shape, dtype=torch.float32)
            self.lse = self.q.new_full(self.lse_shape, -torch.inf, dtype=torch.float32)
        self.out = self.out.float()
        merge_into(self.out[:, rows], self.lse[..., rows], out, lse)

    def result(self):
        """In the dtype of q."""
        if self.kernels is not None:
            if len(self.waiting) > 1 or self.waiting[0][0] != (0, self.rows):
                self._fold(self.q.dtype)
            _, self.out, self.lse = self.waiting[0]
        return self.out.to(self.q.dtype), self.lse


def merge_into(out, lse, other, other_lse):
    """out, lse (float32, changed in place) become those over both sets of keys."""
    weight = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == -torch.inf, 0.0).transpose(-1, -2)[..., None]
    for rows in _runs(out.shape[1]):
        out[:, rows].lerp_(other[:, rows].float(), weight[:, rows])
    torch.logaddexp(lse, other_lse, out=lse)


def _runs(rows):
    """Runs of rows, so that a copy of a run in float32 is small compared with all rows."""
    return [slice(begin, min(begin + _RUN, rows)) for begin in range(0, rows, _RUN)]


class Sum:
    """Adds up parts, each with gradients of some rows, in float32."""

    def __init__(self, like, together=nullcontext):
        self.like, self.rows = like, like.shape[1]
        self.kernels, self.together = _kernels(like), together
        self.waiting = []
        self.total = None

    def add(self, rows, part):
        if self.kernels is not None:
            if len(self.waiting) == self.kernels.PARTS:
                with self.together():
                    self._fold(torch.float32)
            self.waiting.append((rows, part, None))
        elif self.total is None and rows == (0, self.rows):
            self.total = part
        else:
            self.total = torch.zeros_like(self.like, dtype=torch.float32) if self.total is None else self.total.float()
            place = self.total[:, slice(*rows)]
            for run in _runs(part.shape[1]):
                place[:, run] += part[:, run]

    def take(self, other):
        """Adds the content of another sum, which is not used afterwards."""
        if self.total is None and not self.waiting:
            self.total, self.waiting = other.total, other.waiting
            return
        if other.total is not None:
            self.add((0, self.rows), other.total)
        for rows, part, _ in other.waiting:
            self.add(rows, part)

    def _fold(self, dtype):
        total, _ = self.kernels.merge(self.waiting, self.rows, dtype, False)
        self.waiting = [((0, self.rows), total, None)]

    def result(self):
        if self.waiting:
            if len(self.waiting) > 1 or self.waiting[0][0] != (0, self.rows):
                self._fold(self.like.dtype)
            self.total = self.waiting[0][1]
        return torch.zeros_like(self.like) if self.total is None else self.total.to(self.like.dtype)
