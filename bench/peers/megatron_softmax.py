"""One kernel for mask and softmax of a stored score matrix (the scale is in the product before), and its gradient."""

import torch
import triton
import triton.language as tl

HIDDEN = tl.constexpr(-10000.0)


@triton.jit
def softmax_kernel(scores, weights, rows, columns, CAUSAL: tl.constexpr, WIDTH: tl.constexpr):
    """One program, one row of [matrices * rows, columns]."""
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    row = tl.load(scores + index * columns + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    if CAUSAL:
        row = tl.where((column > index % rows) & (column < columns), HIDDEN, row)
    row = tl.exp(row - tl.max(row, 0))
    row = row / tl.sum(row, 0)
    tl.store(weights + index * columns + column, row.to(weights.dtype.element_ty), mask=column < columns)


@triton.jit
def softmax_grad_kernel(weights, grad_weights, grad_scores, columns, WIDTH: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    weight = tl.load(weights + index * columns + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_weights + index * columns + column, mask=inside, other=0.0).to(tl.float32)
    grad = weight * (grad - tl.sum(weight * grad, 0))
    tl.store(grad_scores + index * columns + column, grad.to(grad_scores.dtype.element_ty), mask=inside)


class FusedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, causal):
        matrices, rows, columns = scores.shape
        weights = torch.empty_like(scores)
        softmax_kernel[(matrices * rows,)](
            scores, weights, rows, columns, CAUSAL=causal, WIDTH=triton.next_power_of_2(columns), num_warps=8
        )
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad_weights):
        (weights,) = ctx.saved_tensors
        matrices, rows, columns = weights.shape
        grad_scores = torch.empty_like(weights)
        softmax_grad_kernel[(matrices * rows,)](
            weights, grad_weights.contiguous(), grad_scores, columns, WIDTH=triton.next_power_of_2(columns), num_warps=8
        )
        return grad_scores, None


def fused_softmax(scores, causal):
    return FusedSoftmax.apply(scores, causal)
