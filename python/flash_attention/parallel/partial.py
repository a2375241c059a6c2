"""Partial results of blocks, put together in float32 in the order in which they come."""

import torch


class States:
    """Outputs and lse of some rows each -> those of all rows."""

    def __init__(self, q, head_dim_v):
        batch, self.rows, heads, _ = q.shape
        self.q, self.shape, self.lse_shape = q, (batch, self.rows, heads, head_dim_v), (batch, heads, self.rows)
        self.out = self.lse = None

    def add(self, rows, out, lse):
        if self.out is None:
            if rows == (0, self.rows):
                self.out, self.lse = out, lse
                return
            self.out = self.q.new_zeros(self.shape, dtype=torch.float32)
            self.lse = self.q.new_full(self.lse_shape, -torch.inf, dtype=torch.float32)
        self.out = self.out.float()
        rows = slice(*rows)
        merge_into(self.out[:, rows], self.lse[..., rows], out, lse)

    def result(self):
        """In the dtype of q."""
        return self.out.to(self.q.dtype), self.lse


def merge_into(out, lse, other, other_lse):
    """out, lse (float32, changed in place) become those over both sets of keys."""
    weight = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == -torch.inf, 0.0)
    out.lerp_(other.float(), weight.transpose(-1, -2)[..., None])
    torch.logaddexp(lse, other_lse, out=lse)


class Sum:
    """Gradients of some rows each, added up in float32."""

    def __init__(self, like):
        self.like, self.total = like, None

    def add(self, rows, part):
        if self.total is None and rows == (0, self.like.shape[1]):
            self.total = part
            return
        if self.total is None:
            self.total = torch.zeros_like(self.like, dtype=torch.float32)
        self.total = self.total.float()
        self.total[:, slice(*rows)] += part

    def result(self):
        if self.total is None:
            return torch.zeros_like(self.like)
        return self.total.to(self.like.dtype)
