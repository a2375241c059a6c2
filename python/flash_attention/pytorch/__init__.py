"""PyTorch's side of a call: operators, their gradients and transforms, and what watches them."""
