"""All ranks call with the same problem, or all of them get an error that names the rank and the value that differ.

Ranks compare before anything else is exchanged, so the group can be used after such an error. On the host every call is
compared; it waits for the slowest rank, as its first block would. On a GPU each problem is compared only once, because
reading the answer makes the host wait for all queued work.
"""

import zlib

import torch

from flash_attention.parallel.peers import ParallelError

_agreed = {}  # id of the group -> problems that its ranks have agreed on
_LIMIT = 4096


class Agreement:
    """The check of one call; wait() returns or raises on every rank."""

    def __init__(self, peers, fields, fault, device):
        """fields: {name: value}, the same on all ranks; fault: the error of this rank's arguments, "" if there is none."""
        self.peers, self.fields, self.fault = peers, fields, fault
        known = _agreed.setdefault(peers.group.group_name, set())
        if len(known) > _LIMIT:
            known.clear()
        # The seed changes in every step, the problem does not.
        self.known = known
        self.key = tuple(item for item in fields.items() if item[0] not in ("seed", "offset"))
        self.exchange = None
        if peers.world > 1 and (fault or device.type == "cpu" or self.key not in known):
            self._post(device)

    def _post(self, device):
        values = [_number(value) for value in self.fields.values()]
        mine = torch.tensor(
            [zlib.crc32(self.fault.encode()) if self.fault else 0, *values], dtype=torch.int64, device=device
        )
        others = [rank for rank in range(self.peers.world) if rank != self.peers.rank]
        self.mine, self.found = mine, {rank: torch.empty_like(mine) for rank in others}
        self.exchange = self.peers.post(
            "comparing shapes", [(mine, rank) for rank in others], [(self.found[rank], rank) for rank in others]
        )

    def wait(self):
        """Before the first exchange of a call."""
        if self.exchange is None:
            return
        self.exchange.wait()
        mine = self.mine.tolist()
        rows = {rank: row.tolist() for rank, row in self.found.items()}
        here = f"rank {self.peers.rank} of {self.peers.world}"
        if self.fault:
            raise ParallelError(f"{here}: {self.fault}")
        for rank, row in rows.items():
            if row[0]:
                raise ParallelError(f"{here}: {self.peers.name(rank)} refused its arguments; its own message says why")
        for rank, row in rows.items():
            for (name, value), got, own in zip(self.fields.items(), row[1:], mine[1:], strict=True):
                if got != own:
                    theirs = f"got {got}" if isinstance(value, int) else "got another value"
                    raise ParallelError(f"{here}: {name}: {self.peers.name(rank)} {theirs}; expected {value}, as here")
        self.known.add(self.key)


def _number(value):
    """The value itself if it is a whole number; else a checksum."""
    if isinstance(value, int):
        return int(value)
    return zlib.crc32(repr(value).encode())
