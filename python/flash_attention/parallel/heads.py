"""Heads cut by rank: which rank computes which heads. Any number of heads; some ranks may get fewer, or none."""

from functools import lru_cache
from typing import NamedTuple


class Share(NamedTuple):
    """Query heads q[0] .. q[1] and the key heads that they read. Each key head has the same number of query heads."""

    q: tuple[int, int]
    kv: tuple[int, int]


@lru_cache(maxsize=1024)
def head_ranges(heads_q: int, heads_kv: int, world: int, rank: int) -> tuple[Share, ...]:
    """The heads of a rank: whole groups if there are enough of them; else groups are cut, and key heads are sent twice."""
    if heads_q % heads_kv:
        raise ValueError(f"heads_kv: got {heads_kv}; allowed: a divisor of heads_q, {heads_q}")
    group = heads_q // heads_kv
    if heads_kv >= world:
        low, high = (heads_kv * r // world for r in (rank, rank + 1))
        return (Share((low * group, high * group), (low, high)),) if low < high else ()
    low, high = (heads_q * r // world for r in (rank, rank + 1))
    found = []
    while low < high:
        head = low // group
        end = min(high, (head + 1) * group)
        found.append(Share((low, end), (head, head + 1)))
        low = end
    return tuple(found)
