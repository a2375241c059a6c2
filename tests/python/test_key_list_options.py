"""Lists of keys with all options at once, drawn: out, lse and gradients against dense matrices in float64; NaN in every row
that no list names; the same bits again; a list of all keys beside no list.
"""

import math
import random

import pytest

torch = pytest.importorskip("torch")

from flash_attention import attention, attention_over_cache, attention_packed, dropout_mask  # noqa: E402
from key_list_formula import attend, times_of  # noqa: E402

LARGEST = torch.iinfo(torch.int32).max


class Drawn:
    """A call: sizes, options, lists."""

    def __init__(self, seed, kind):
        self.dice, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        pick = self.dice.choice
        self.seed, self.batch, self.heads_kv = seed, pick([1, 2, 3]), pick([1, 2, 3])
        self.heads = self.heads_kv * pick([1, 2, 4])
        self.seq_q, self.seq_kv = pick([1, 2, 7, 17, 33]), pick([1, 5, 16, 37, 67, 130])
        self.dim, self.dim_v = pick([8, 13, 16, 40]), pick([8, 13, 24])
        self.size = pick([None, (1 if kind == "packed" else pick([1, 3, 8, 64]), pick([1, 2, 5, 16, 64, 1000]))])
        self.groups = pick([1, self.heads_kv, self.heads] if self.size else [1, self.heads_kv])
        self.entries, self.counted = pick([0, 1, 2, 5, 9, 65, 140]), pick([True, False])
        self.options = {}
        self.sometimes(0.4, "causal", True) or self.sometimes(0.4, "window", (pick([-1, 0, 3, 20]), pick([-1, 0, 5])))
        self.sometimes(0.3, "softcap", 2.5)
        self.sometimes(0.2, "scale", pick([0.4, -0.3]))
        self.sometimes(0.3, "alibi_slopes", torch.rand(self.heads, generator=self.generator))
        self.sometimes(0.4, "sink", self.normal(self.heads))
        self.sometimes(0.15, "attention_chunk", 9)
        if kind != "cache":
            self.sometimes(0.3, "alignment", "top_left")
            self.sometimes(0.25, "dropout_p", 0.3)

    def sometimes(self, probability, name, value):
        if self.dice.random() < probability:
            self.options[name] = value
            return True
        return False

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def lists(self, *rows):
        """Lists with holes, duplicates and extremes, some of them empty, and their counts, wrong ones too."""
        shape, units = (*rows, self.groups, self.entries), -(-self.seq_kv // (self.size or (1, 1))[1])
        lists = torch.randint(-2, units + 2, shape, generator=self.generator).int()
        if self.entries > 3:
            lists[..., 0], lists[..., -1], lists[..., 1] = LARGEST, -LARGEST - 1, lists[..., 2]
        empty = torch.rand(shape[:-1], generator=self.generator) < 0.1
        lists[empty] = torch.tensor(self.dice.choice([-1, LARGEST, self.seq_kv]), dtype=torch.int32)
        counts = torch.randint(-1, self.entries + 3, shape[:-1], generator=self.generator).int() if self.counted else None
        chosen = {"key_blocks": lists, "key_block_size": self.size} if self.size else {"key_indices": lists}
        return lists, counts, chosen | {"key_counts": counts}

    def times(self, lists, counts, seq_q, keys):
        return times_of(lists, counts, seq_q, keys, self.heads, self.heads_kv, self.size)

    def expected(self, q, k, v, lists, counts, **more):
        options = {name: value for name, value in self.options.items() if name != "dropout_p"}
        if "dropout_p" in self.options:
            options |= {"kept": more.pop("kept")[:, : len(q), : len(k)], "dropout_p": self.options["dropout_p"]}
        more.pop("kept", None)
        return attend(q, k, v, self.times(lists, counts, len(q), len(k)), **options, **more)

    def kept(self):
        p = self.options.get("dropout_p", 0.0)
        return torch.from_numpy(dropout_mask((self.batch, self.heads, self.seq_q, self.seq_kv), p, self.seed)).double()

    def seeded(self):
        return self.options | ({"seed": self.seed} if "dropout_p" in self.options else {})


def close(got, want, tolerance=2e-5):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def check_gradients(drawn, call, inputs, expected, again):
    """call(k, v): out and lse. expected: the same in float64. again: k and v with NaN in what no list names."""
    out, lse = call(*inputs[1:3])
    close(out, expected[0])
    close(lse, expected[1])
    weight, of_lse = drawn.normal(*out.shape), drawn.normal(*lse.shape)

    def gradients(out, lse, inputs):
        total = (out * weight).sum() + (torch.where(lse.isinf(), 0.0, lse) * of_lse).sum()
        return torch.autograd.grad(total, inputs, materialize_grads=True)

    got, want = gradients(out, lse, inputs), gradients(*expected, inputs)
    for ours, exact in zip(got, want, strict=True):
        close(ours, exact, 1e-4)
    k, v = (x.detach().requires_grad_() for x in again)
    out_again, lse_again = call(k, v)
    assert torch.equal(out_again, out) and torch.equal(lse_again, lse)
    for ours, before in zip(gradients(out_again, lse_again, [inputs[0], k, v, *inputs[3:]]), got, strict=True):
        assert torch.equal(ours, before)


def without_unnamed(drawn, k, v, named):
    """k and v with NaN and Inf in the rows that `named` [heads, .., keys] does not."""
    kept = named.unflatten(0, (drawn.heads_kv, -1)).any(1).movedim(0, -1)[..., None]
    return torch.where(kept, k, math.nan), torch.where(kept, v, math.inf)


SEEDS = [*range(30), *(pytest.param(seed, marks=pytest.mark.long_tail) for seed in range(30, 300))]


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn(seed):
    drawn = Drawn(seed, "dense")
    batch, seq_q, seq_kv = drawn.batch, drawn.seq_q, drawn.seq_kv
    q, k, v = (
        drawn.normal(batch, seq_q, drawn.heads, drawn.dim),
        drawn.normal(batch, seq_kv, drawn.heads_kv, drawn.dim),
        None,
    )
    v = drawn.normal(batch, seq_kv, drawn.heads_kv, drawn.dim_v)
    inputs = [x.requires_grad_() for x in (q, k, v, *([drawn.options["sink"]] if "sink" in drawn.options else []))]
    lists, counts, chosen = drawn.lists(batch, -(-seq_q // (drawn.size or (1, 1))[0]))
    more, used_q, used_kv = {}, [seq_q] * batch, [seq_kv] * batch
    if drawn.dice.random() < 0.3:
        used_q, used_kv = ([drawn.dice.randint(0, n) for _ in range(batch)] for n in (seq_q, seq_kv))
        more |= {"seqused_q": torch.tensor(used_q).int(), "seqused_kv": torch.tensor(used_kv).int()}
    shape = (drawn.dice.choice([1, batch]), drawn.dice.choice([1, drawn.heads]), seq_q, seq_kv)
    if drawn.dice.random() < 0.3:
        more["bias"] = drawn.normal(*shape)
    if drawn.dice.random() < 0.3:
        more["mask"] = torch.rand(shape, generator=drawn.generator) < 0.7
    whole = {name: more[name].expand(batch, drawn.heads, -1, -1) for name in ("bias", "mask") if name in more}
    parts, named, kept = [], [], drawn.kept()
    for b in range(batch):
        rows, keys = used_q[b], used_kv[b]
        own = {{"mask": "shown"}.get(name, name): x[b][:, :rows, :keys] for name, x in whole.items()}
        own_counts = None if counts is None else counts[b]
        out, lse = drawn.expected(q[b, :rows], k[b, :keys], v[b, :keys], lists[b], own_counts, kept=kept[b], **own)
        parts.append((
            torch.cat((out, out.new_zeros(seq_q - rows, *out.shape[1:]))),
            torch.cat((lse, lse.new_full((drawn.heads, seq_q - rows), -math.inf)), 1),
        ))  # fmt: skip
        named.append(drawn.times(lists[b], own_counts, rows, seq_kv).any(1) & (torch.arange(seq_kv) < keys))
    call = lambda k, v: attention(q, k, v, **chosen, **drawn.seeded(), **more, return_lse=True)  # noqa: E731
    expected = [torch.stack(part) for part in zip(*parts, strict=True)]
    check_gradients(drawn, call, inputs, expected, without_unnamed(drawn, k, v, torch.stack(named, 1)))


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_packed(seed):
    drawn = Drawn(1000 + seed, "packed")
    of_q, of_kv = (
        [drawn.dice.choice([0, 1, longest // 2, longest]) for _ in range(drawn.batch)]
        for longest in (drawn.seq_q, drawn.seq_kv)
    )
    ends_q, ends_kv = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (of_q, of_kv))
    q = drawn.normal(sum(of_q), drawn.heads, drawn.dim)
    k, v = (drawn.normal(sum(of_kv), drawn.heads_kv, dim) for dim in (drawn.dim, drawn.dim_v))
    inputs = [x.requires_grad_() for x in (q, k, v, *([drawn.options["sink"]] if "sink" in drawn.options else []))]
    lists, counts, chosen = drawn.lists(sum(of_q))
    parts, named, kept = [], [], drawn.kept()
    for b in range(drawn.batch):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_kv[b], ends_kv[b + 1])
        own_counts = None if counts is None else counts[rows]
        parts.append(drawn.expected(q[rows], k[keys], v[keys], lists[rows], own_counts, kept=kept[b]))
        named.append(drawn.times(lists[rows], own_counts, of_q[b], of_kv[b]).any(1))
    expected = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    def call(k, v):
        return attention_packed(q, k, v, ends_q, ends_kv, **chosen, **drawn.seeded(), return_lse=True)

    check_gradients(drawn, call, inputs, expected, without_unnamed(drawn, k, v, torch.cat(named, 1)))


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_over_a_cache(seed):
    drawn = Drawn(2000 + seed, "cache")
    batch, seq_kv, page = drawn.batch, drawn.seq_kv, drawn.dice.choice([0, 4, 16])
    q = drawn.normal(batch, drawn.seq_q, drawn.heads, drawn.dim)
    k, v = (drawn.normal(batch, seq_kv, drawn.heads_kv, dim) for dim in (drawn.dim, drawn.dim_v))
    used = torch.tensor([drawn.dice.randint(0, seq_kv) for _ in range(batch)]).int()
    lists, counts, chosen = drawn.lists(batch, -(-drawn.seq_q // (drawn.size or (1, 1))[0]))
    beyond = torch.arange(seq_kv)[None, :, None, None] >= used[:, None, None, None]
    cached, more = [torch.where(beyond, math.nan, x) for x in (k, v)], {"seqused_kv": used}
    if page:
        pages = -(-seq_kv // page)
        table = torch.randperm(batch * pages + 2, generator=drawn.generator)[: batch * pages].view(batch, pages)
        more["page_table"] = table.int()
        for n, x in enumerate(cached):
            whole = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * page - seq_kv), value=math.nan)
            cached[n] = torch.full((batch * pages + 2, page, *x.shape[2:]), math.nan)
            cached[n][table] = whole.unflatten(1, (pages, page))
    out, lse = attention_over_cache(q, *cached, **chosen, **drawn.options, **more, return_lse=True)
    for b in range(batch):
        own_counts = None if counts is None else counts[b]
        want = drawn.expected(q[b], k[b, : used[b]], v[b, : used[b]], lists[b], own_counts)
        close(out[b], want[0])
        close(lse[b], want[1])


@pytest.mark.parametrize("blocks", [False, True])
def test_a_list_of_all_keys_is_no_list(blocks):
    """In any order; with gradients, those of a bias aside."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, n, heads, 24, generator=generator).requires_grad_() for n, heads in ((21, 4), (50, 2), (50, 2))
    )
    more = {"causal": True, "softcap": 3.0, "return_lse": True, "sink": torch.randn(4, generator=generator)}
    order = torch.argsort(torch.rand(2, 21, 1, 10 if blocks else 50, generator=generator)).int()
    chosen = {"key_blocks": order, "key_block_size": (1, 5)} if blocks else {"key_indices": order}
    dense, listed = attention(q, k, v, **more), attention(q, k, v, **chosen, **more)
    weight = torch.randn(dense[0].shape, generator=generator)
    for results in zip(dense, listed, strict=True):
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for gradients in zip(
        *(torch.autograd.grad((out * weight).sum() + lse.sum(), (q, k, v)) for out, lse in (dense, listed)), strict=True
    ):
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_ten_runs_have_the_same_bits():
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, n, heads, 40, generator=generator) for n, heads in ((130, 8), (300, 2), (300, 2)))
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        lists = torch.randint(-1, 300, (2, 130, 2, 70), generator=generator).int()
        found = []
        for _ in range(10):
            out, lse = attention(*inputs, key_indices=lists, causal=True, return_lse=True, deterministic=True)
            found.append((out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), inputs)))
        assert all(torch.equal(a, b) for again in found for a, b in zip(again, found[0], strict=True))
