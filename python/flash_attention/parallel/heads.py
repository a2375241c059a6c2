"""Heads cut by rank: who computes which of them. Any numbers of heads, ranks with fewer or none included."""

from functools import lru_cache
from typing import NamedTuple


class Share(NamedTuple):
    """Query heads q[0] .. q[1] and the key heads that they read, with the same number of query heads for each of these."""

    q: tuple[int, int]
    kv: tuple[int, int]


@lru_cache(maxsize=1024)
def head_ranges(heads_q: int, heads_kv: int, world: int, rank: int) -> tuple[Share, ...]:
    """What a rank computes. Whole groups where there are enough; else groups are cut and key heads sent twice."""
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
