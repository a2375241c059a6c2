"""flash_attn_with_kvcache over the parameters for which FlashAttention-2 is tested.

New keys or none, rotary positions, pages, rows of a larger cache, left padding, masks, ALiBi and splits; outputs against
float64, and every element of the cache: new rows are written, and no others. On CUDA every pair of values occurs, and each
call is repeated: its bits must not change.
"""

import grid
import pytest
import reference
import torch
from comparison import assert_close
from flash_attention import flash_attn

AXES = {
    "lengths": (
        *((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (1, 8192), (16, 3000), (128, 128)),
    ),
    "head_dim": (32, 59, 64, 80, 128, 256),
    "heads": ((6, 6), (6, 1), (6, 3), (16, 2)),
    "new": ("none", "as many as queries", "other"),
    "rotary": (0, 0.5, 1),
    "interleaved": (False, True),
    "place": ("rows", "row index", "pages of 16", "pages of 256"),
    "left_padding": (False, True),
    "causal": (False, True),
    "local": (False, True),
    "alibi": (False, True),
    "softcap": (0.0, 20.0),
    "num_splits": (0, 1, 3),
    "dtype": (torch.float16, torch.bfloat16),
}  # fmt: skip
SMALL = {
    "lengths": ((1, 37), (3, 64), (5, 33), (20, 70)),
    "head_dim": (16, 40, 59, 64),
    "dtype": (torch.float32, torch.bfloat16),
}
BATCH = 3


def rotated(x, angles, interleaved):
    """x [seq, heads, dim] with the pairs of its first dimensions rotated by angles [seq, dim / 2]; in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    width = 2 * angles.shape[-1]
    pairs = slice(0, width, 2), slice(1, width, 2)
    if not interleaved:
        pairs = slice(0, width // 2), slice(width // 2, width)
    a, b = (wide[..., part] for part in pairs)
    cos, sin = (f(angles.double()).to(x.dtype).to(wide.dtype)[:, None] for f in (torch.cos, torch.sin))
    result = wide.clone()
    result[..., pairs[0]], result[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return result.to(x.dtype)


class Problem:
    """A cache in its place, with NaN wherever nobody may look, and what a call has to make of it."""

    def __init__(self, point, device):
        self.point, self.device = point, device
        (self.seq_q, capacity), (heads, heads_kv), dim = point["lengths"], point["heads"], point["head_dim"]
        self.seq_new = {"none": 0, "other": max(1, self.seq_q // 2 + 1)}.get(point["new"], self.seq_q)
        self.seq_new = min(self.seq_new, capacity)
        random = torch.Generator().manual_seed(7)
        self.held = torch.randint(0, capacity - self.seq_new + 1, (BATCH,), generator=random)
        self.held[0] = capacity - self.seq_new
        total = self.held + self.seq_new
        self.pad = (total * torch.rand(BATCH, generator=random)).long() * point["left_padding"]

        def draw(*shape):
            return torch.randn(*shape, generator=random).to(point["dtype"]).to(device)

        self.q = draw(BATCH, self.seq_q, heads, dim)
        self.new = [draw(BATCH, self.seq_new, heads_kv, dim) for _ in range(2)]
        self.old = [[draw(int(length), heads_kv, dim) for length in self.held] for _ in range(2)]
        self.slopes = 0.3 * torch.rand(BATCH, heads, generator=random).to(device) if point["alibi"] else None
        self.window = (37, 11) if point["local"] else (-1, -1)
        width = int(point["rotary"] * dim) // 16 * 16
        self.angles = 6 * torch.rand(capacity + self.seq_q, width // 2, generator=random, dtype=torch.float64).to(device)
        self.place(capacity, random)

    def place(self, capacity, random):
        """(page, row in it) of each key of the cache."""
        paged = self.point["place"].startswith("pages")
        size = int(self.point["place"].split()[-1]) if paged else capacity
        each = -(-capacity // size)
        spare = 0 if self.point["place"] == "rows" else 3
        order = torch.arange(BATCH * each + spare)
        if spare:
            order = order[torch.randperm(len(order), generator=random)]
        self.table, self.page_size = order[: BATCH * each].view(BATCH, each), size
        shape = (len(order), size, *self.new[0].shape[2:])
        self.caches = [torch.full(shape, torch.nan, dtype=self.point["dtype"], device=self.device) for _ in range(2)]
        for cache, rows in zip(self.caches, self.old, strict=True):
            for b, row in enumerate(rows):
                cache[self.where(b, 0, len(row))] = row

    def where(self, b, begin, end):
        j = torch.arange(begin, end)
        return self.table[b, j // self.page_size], j % self.page_size

    def call(self, caches):
        point, options = self.point, {}
        table = self.table.to(torch.int32).to(self.device)
        if point["place"] == "row index":
            options["cache_batch_idx"] = table[:, 0]
        elif point["place"] != "rows":
            options["block_table"] = table
        if point["left_padding"]:
            options["cache_leftpad"] = self.pad.to(torch.int32).to(self.device)
        if self.angles.shape[-1]:
            options["rotary_cos"], options["rotary_sin"] = (
                f(self.angles).to(point["dtype"]) for f in (torch.cos, torch.sin)
            )
        return flash_attn.flash_attn_with_kvcache(
            self.q, *caches, *(self.new if self.seq_new else (None, None)),
            causal=point["causal"], softcap=point["softcap"],
            cache_seqlens=self.held.to(torch.int32).to(self.device), window_size=self.window, alibi_slopes=self.slopes,
            rotary_interleaved=point["interleaved"], num_splits=point["num_splits"], return_softmax_lse=True, **options,
        )  # fmt: skip

    def new_key(self, b, dtype):
        at = int(self.held[b]) + torch.arange(self.seq_new, device=self.device)
        return rotated(self.new[0][b].to(dtype), self.angles[at], self.point["interleaved"])

    def expected(self, dtype):
        """(out, lse) in a precision; what the cache holds is rounded to its type."""
        point, results = self.point, []
        ordered = point["causal"] or point["local"]  # else all queries stand where the first one does
        for b in range(BATCH):
            at = int(self.held[b]) + torch.arange(self.seq_q, device=self.device) * int(ordered)
            q = rotated(self.q[b].to(dtype), self.angles[at], point["interleaved"])
            new = self.new_key(b, dtype), self.new[1][b].to(dtype)
            k, v = (torch.cat([old[b].to(dtype), x])[int(self.pad[b]) :] for old, x in zip(self.old, new, strict=True))
            slopes = None if self.slopes is None else self.slopes[b].to(dtype)
            options = {"causal": point["causal"], "softcap": point["softcap"], "alibi_slopes": slopes}
            results.append(reference.attention(q[None], k[None], v[None], window=self.window, **options))
        return [torch.cat(parts) for parts in zip(*results, strict=True)]

    def check_cache(self, before, after):
        """The new rows are there, and nothing else has changed: not a bit."""
        want = [cache.clone() for cache in before]
        for b in range(BATCH if self.seq_new else 0):
            rows = self.where(b, int(self.held[b]), int(self.held[b]) + self.seq_new)
            torch.testing.assert_close(
                after[0][rows].double(), self.new_key(b, torch.float64), rtol=1e-2, atol=1e-2, msg="a new key"
            )
            assert torch.equal(after[1][rows], self.new[1][b]), "a new value"
            want[0][rows], want[1][rows] = after[0][rows], after[1][rows]
        for was, now in zip(want, after, strict=True):
            assert torch.equal(was.nan_to_num(123.0), now.nan_to_num(123.0)), "another row of the cache was written"


def check(point, device, repeats):
    problem = Problem(point, device)
    caches = [cache.clone() for cache in problem.caches]
    out, lse = problem.call(caches)
    exact, plain = problem.expected(torch.float64), problem.expected(point["dtype"])
    for name, *three in zip(("out", "lse"), (out, lse), exact, plain, strict=True):
        assert_close(*three, what=name)
    problem.check_cache(problem.caches, caches)
    for _ in range(repeats):
        again = [cache.clone() for cache in problem.caches]
        for was, now in zip((out, lse, *caches), (*problem.call(again), *again), strict=True):
            assert torch.equal(was.nan_to_num(123.0), now.nan_to_num(123.0)), "a repeated call gave other bits"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("point", grid.pairs(AXES), ids=grid.name_of)
def test_on_cuda(point):
    check(point, "cuda", repeats=10)


@pytest.mark.parametrize("point", grid.points(16, {**AXES, **SMALL}, seed=2), ids=grid.name_of)
def test_on_the_cpu(point):
    check(point, "cpu", repeats=1)
