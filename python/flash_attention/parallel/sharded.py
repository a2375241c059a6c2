"""DTensors that are sharded along the sequence."""

from flash_attention.parallel.peers import resolve_group


def to_local(q, k, v, mesh_or_group, packed):
    """((q, k, v) of this rank, the mesh along which the sequence is cut)."""
    from torch.distributed.tensor import Replicate, Shard

    axis = 0 if packed else 1
    for name, tensor in (("k", k), ("v", v)):
        if getattr(tensor, "placements", None) != q.placements or tensor.device_mesh != q.device_mesh:
            got = getattr(tensor, "placements", "no DTensor")
            raise ValueError(f"{name}: got {got}; expected the placements and the mesh of q, {q.placements}")
    cut = [dim for dim, placement in enumerate(q.placements) if placement == Shard(axis)]
    if len(cut) != 1 or not all(isinstance(placement, Replicate | Shard) for placement in q.placements):
        raise ValueError(
            f"q: got placements {q.placements}; expected Shard({axis}), the sequence, along one axis of the mesh"
        )
    mesh = q.device_mesh
    if mesh.ndim > 1:
        if mesh.mesh_dim_names is None:
            raise ValueError(f"q: got a mesh of {mesh.ndim} axes without names; expected mesh_dim_names")
        mesh = mesh[mesh.mesh_dim_names[cut[0]]]
    if mesh_or_group is not None and resolve_group(mesh_or_group) is not resolve_group(mesh):
        raise ValueError("mesh_or_group: got another group than that along which q is sharded")
    if q.shape[axis] % mesh.size():
        raise ValueError(f"q: got a sequence of {q.shape[axis]}; a group of {mesh.size()} does not divide it")
    return tuple(tensor.to_local() for tensor in (q, k, v)), mesh


def from_local(q, result, return_lse):
    """The results as DTensors with the placements of q."""
    from torch.distributed.tensor import DTensor, Shard

    out, lse = result if return_lse else (result, None)
    out = DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)
    if not return_lse:
        return out
    moved = {0: 0, 1: 2, 2: 1} if lse.dim() == 3 else {0: 1, 1: 0}  # axes of q -> axes of lse
    places = [Shard(moved[place.dim]) if isinstance(place, Shard) else place for place in q.placements]
    return out, DTensor.from_local(lse, q.device_mesh, places, run_check=False)
