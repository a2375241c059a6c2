"""Arguments of append_kv() and prepare_qk(): norms, sections and positions of angles."""

import torch


def norm_of(weight):
    """(whether there is a norm, its weights or None) of None, True or a tensor."""
    return (weight is not None and weight is not False, weight if isinstance(weight, torch.Tensor) else None)


def numbers(q_norm, k_norm, norm_plus_one, norm_eps, sections, sections_interleaved):
    """The last of _core.append's scalars."""
    sections = [] if sections is None else [int(pairs) for pairs in sections]
    return bool(q_norm), bool(k_norm), bool(norm_plus_one), float(norm_eps), sections, bool(sections_interleaved)


def angle_tensor(positions):
    """Positions as the kernels read them."""
    return positions if positions is None or positions.is_contiguous() else positions.contiguous()
