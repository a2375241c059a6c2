"""Cases of context_attention(): inputs from a seed, so that every process makes the same ones."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Case:
    name: str
    method: str = "ring"
    layout: str = "zigzag"
    batch: int = 2
    seq: int = 64
    heads: int = 4
    heads_kv: int = 2
    dim: int = 16
    dim_v: int = 16
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)  # of attention(), for the whole sequence
    extras: tuple = ()  # bias, mask, sink, alibi, key_lengths, row_bias
    documents: tuple = ()
    ranks: int = 4
    slice_rows: int = 0  # rows times heads that go round together; 0: the library's choice

    @property
    def id(self):
        return f"{self.name}-{self.method}-{self.layout}-{self.ranks}"


def inputs(case):
    """{q, k, v, dout, dlse and extras} of the whole sequence, [batch, seq, heads, dim]."""
    generator = torch.Generator().manual_seed(7)

    def normal(*sizes, dtype=case.dtype):
        return torch.randn(*sizes, generator=generator).to(dtype)

    batch, seq = case.batch, case.seq
    found = {
        "q": normal(batch, seq, case.heads, case.dim) * 2,
        "k": normal(batch, seq, case.heads_kv, case.dim),
        "v": normal(batch, seq, case.heads_kv, case.dim_v),
        "dout": normal(batch, seq, case.heads, case.dim_v),
        "dlse": normal(batch, case.heads, seq, dtype=torch.float32),
    }
    if "bias" in case.extras:
        found["bias"] = normal(1, case.heads, seq, seq, dtype=torch.float32)
    if "row_bias" in case.extras:
        found["bias"] = normal(batch, 1, 1, seq, dtype=torch.float32)
    if "mask" in case.extras:
        mask = torch.rand(batch, 1, seq, seq, generator=generator) < 0.5
        mask[:, :, 3] = False  # a row that sees nothing
        found["mask"] = mask
    if "sink" in case.extras:
        found["sink"] = normal(case.heads, dtype=torch.float32)
    if "alibi" in case.extras:
        found["alibi_slopes"] = torch.rand(case.heads, generator=generator)
    if "key_lengths" in case.extras:
        found["key_lengths"] = torch.tensor([seq - 11, 5] * batch, dtype=torch.int32)[:batch]
    return found


def differentiable(found):
    return [name for name in ("q", "k", "v", "bias", "sink") if name in found]


def run_case(group, case):
    """In a worker: numpy arrays of this rank's out, lse and gradients by name."""
    import torch.distributed as dist
    from flash_attention.parallel import context_attention, ring, split

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ring.SLICE_ROWS = {"cpu": case.slice_rows or 512}
    whole = inputs(case)
    local = {name: tensor.clone() for name, tensor in whole.items()}
    for name, axis in (("q", 1), ("k", 1), ("v", 1), ("dout", 1), ("dlse", 2), ("bias", 2), ("mask", 2)):
        if name in local and local[name].shape[axis] == case.seq:
            local[name] = split(local[name], world, rank, dim=axis, layout=case.layout)
    dout, dlse = local.pop("dout"), local.pop("dlse")
    if case.documents:
        local |= {name: local[name][0] for name in ("q", "k", "v")}
        dout, dlse = dout[0], dlse[0]
    names = differentiable(local)
    for name in names:
        local[name].requires_grad_()
    out, lse = context_attention(
        mesh_or_group=group,
        method=case.method,
        layout=case.layout,
        cu_seqlens=case.documents or None,
        return_lse=True,
        **local,
        **case.options,
    )
    loss = (out * dout).float().sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
    gradients = torch.autograd.grad(loss, [local[name] for name in names])
    found = {"out": out, "lse": lse} | {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    return {name: tensor.detach().float().numpy() for name, tensor in found.items()}
