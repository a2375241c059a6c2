"""A process group for the methods: sends and receives blocks at the same time; its errors name the rank and the cause."""

import re
from datetime import timedelta

import torch.distributed as dist


class ParallelError(RuntimeError):
    """Context parallelism cannot continue; the message names this rank, the other rank and the cause."""


def resolve_group(mesh_or_group):
    """The ProcessGroup of a group, of a DeviceMesh of one axis, or the default group (None)."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ParallelError(
            "mesh_or_group: torch.distributed is not initialised; call init_process_group() or use torchrun"
        )
    if mesh_or_group is None:
        return dist.group.WORLD
    if hasattr(mesh_or_group, "get_group"):
        if mesh_or_group.ndim != 1:
            names = mesh_or_group.mesh_dim_names or "unnamed"
            raise ValueError(
                f"mesh_or_group: got a mesh of {mesh_or_group.ndim} axes ({names}); "
                "expected the one along which the sequence is cut, as mesh['cp']"
            )
        return mesh_or_group.get_group()
    if not isinstance(mesh_or_group, dist.ProcessGroup):
        kind = type(mesh_or_group).__name__
        raise TypeError(f"mesh_or_group: expected a ProcessGroup, a DeviceMesh or None, got {kind}")
    return mesh_or_group


class Peers:
    """The other ranks of a group. Ranks are numbers in the group; messages add the global rank if it differs."""

    def __init__(self, group, timeout=None):
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ParallelError(f"mesh_or_group: rank {dist.get_rank()} is not in this group")
        self.timeout = None if timeout is None else timedelta(seconds=timeout)

    def name(self, rank):
        everywhere = dist.get_global_rank(self.group, rank)
        return f"rank {rank}" if everywhere == rank else f"rank {rank} (global {everywhere})"

    def post(self, what, sends, receives):
        """Starts to send and receive lists of (tensor, rank). The tensors are contiguous; leave them alone until wait()."""
        operations = [(dist.irecv, tensor, rank) for tensor, rank in receives if tensor.numel()]
        operations += [(dist.isend, tensor, rank) for tensor, rank in sends if tensor.numel()]
        if not operations:
            return Exchange(self, what, [], [])
        try:
            works = dist.batch_isend_irecv(
                [dist.P2POp(op, tensor, group=self.group, group_peer=rank) for op, tensor, rank in operations]
            )
        except (RuntimeError, ValueError) as error:
            ranks = sorted({self.name(rank) for _, _, rank in operations})
            raise self.failure(what, "to and from", ", ".join(ranks), error) from error
        if len(works) != len(operations):  # NCCL returns one for all of them
            operations = [(None, None, None)] * len(works)
        return Exchange(self, what, works, operations)

    def failure(self, what, direction, peer, error):
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        cause = re.sub(r"^\[\S*\] ", "", cause).partition(". This is typically")[0]  # gloo's, without its advice
        return ParallelError(
            f"rank {self.rank} of {self.world}: {what} {direction} {peer} failed: {cause} "
            "(that process died, stopped, or left the call with an error of its own)"
        )


class Exchange:
    """Messages under way."""

    def __init__(self, peers, what, works, operations):
        self.peers, self.what, self.works, self.operations = peers, what, works, operations

    def wait(self):
        """On a GPU only the current stream waits; the host continues."""
        works, self.works = self.works, []
        for work, (op, _, rank) in zip(works, self.operations, strict=True):
            try:
                done = work.wait() if self.peers.timeout is None else work.wait(self.peers.timeout)
            except (RuntimeError, ValueError) as error:
                direction = {dist.irecv: "from", dist.isend: "to"}.get(op, "with")
                peer = "its peers" if rank is None else self.peers.name(rank)
                raise self.peers.failure(self.what, direction, peer, error) from error
            if done is False:
                raise self.peers.failure(self.what, "with", "its peers", RuntimeError("not completed"))
