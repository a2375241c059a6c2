"""context_attention() on gloo with 2 and 4 processes against one process in float64."""

import numpy
import pytest
import reference
import torch
from comparison import assert_close, exact_and_plain
from flash_attention.parallel import join
from parallel_cases import Case, differentiable, inputs, run_case
from parallel_pool import Pool

CAUSAL = {"causal": True}
DROPOUT = {"causal": True, "dropout_p": 0.3, "seed": 0x1234567890, "offset": 5}
DOCUMENTS = (0, 5, 5, 40, 41, 64)
BOTH = ("ring", "all_gather")
LAYOUTS = ("zigzag", "contiguous")

CASES = [
    *(Case("causal", m, s, options=CAUSAL, ranks=r) for m in (*BOTH, "ulysses") for s in LAYOUTS for r in (2, 4)),
    *(Case("full", m, options={"softcap": 3.0, "scale": 0.4}, dim_v=24) for m in (*BOTH, "ulysses")),
    *(Case("window", m, s, options={"window": (9, 0)}) for m in BOTH for s in LAYOUTS),
    *(Case("window_both", m, options={"window": (5, 17)}, extras=("sink",)) for m in BOTH),
    *(Case("documents", m, s, batch=1, options=CAUSAL, documents=DOCUMENTS, extras=("sink",))
      for m in (*BOTH, "ulysses") for s in LAYOUTS),
    *(Case("documents_full", m, batch=1, documents=DOCUMENTS, options={"window": (11, 3)}) for m in BOTH),
    *(Case("documents_whole", m, batch=1, documents=DOCUMENTS) for m in BOTH),
    *(Case("sink", m, options=CAUSAL, extras=("sink",)) for m in (*BOTH, "ulysses")),
    *(Case("key_lengths", m, options=CAUSAL, extras=("key_lengths",)) for m in (*BOTH, "ulysses")),
    *(Case("mask", m, extras=("mask",)) for m in BOTH),
    *(Case("bias", m, options=CAUSAL, extras=("bias", "mask")) for m in BOTH),
    *(Case("row_bias", m, extras=("row_bias",), ranks=2) for m in BOTH),
    *(Case("bfloat16", m, options=CAUSAL, dtype=torch.bfloat16) for m in (*BOTH, "ulysses")),
    *(Case("float16", m, options=CAUSAL, dtype=torch.float16, ranks=2) for m in (*BOTH, "ulysses")),
    Case("many_heads", options=CAUSAL, heads=6, heads_kv=6),
    Case("sliced_heads", options=CAUSAL, heads=6, heads_kv=3, slice_rows=1, extras=("sink", "bias", "mask")),
    Case("sliced_group", options={"window": (9, 0)}, heads=8, heads_kv=1, slice_rows=1, dtype=torch.bfloat16, ranks=2),
    Case("sliced_documents", batch=1, options=CAUSAL, heads=8, slice_rows=1, documents=DOCUMENTS, extras=("sink",)),
    Case("auto", "auto", options=CAUSAL),
    Case("uneven_heads", "ulysses", options=CAUSAL, heads=6, heads_kv=2),
    Case("fewer_heads_than_ranks", "ulysses", options=CAUSAL, heads=3, heads_kv=1, extras=("sink",)),
    Case("alibi", "ulysses", extras=("alibi",), options=CAUSAL),
    *(Case("dropout", m, options=DROPOUT, ranks=r) for m in ("ulysses", "ring") for r in (2, 4)),
    Case("dropout_uneven", "auto", options=DROPOUT, heads=6, heads_kv=3, extras=("sink", "alibi")),
    Case("dropout_documents", "ulysses", batch=1, options=DROPOUT, documents=DOCUMENTS, extras=("sink",)),
    Case("dropout_key_lengths", "ulysses", options=DROPOUT, extras=("key_lengths",)),
]  # fmt: skip


# What repeats a kind: the same cut with fewer ranks, in the other layout or in the third dtype.
REPEATS = {
    *(f"causal-{method}-contiguous-2" for method in (*BOTH, "ulysses")),
    *(f"causal-{method}-zigzag-2" for method in ("all_gather", "ulysses")),
    "causal-ulysses-contiguous-4",
    "documents-ulysses-contiguous-4",
    "documents-all_gather-contiguous-4",
    "documents_whole-all_gather-zigzag-4",
    "window-all_gather-contiguous-4",
    "float16-all_gather-zigzag-2",
    "float16-ulysses-zigzag-2",
    "dropout-ring-zigzag-2",
    "dropout-ulysses-zigzag-2",
    "sink-all_gather-zigzag-4",
    "row_bias-all_gather-zigzag-2",
}
PARAMETERS = [pytest.param(c, marks=[pytest.mark.long_tail] if c.id in REPEATS else [], id=c.id) for c in CASES]


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


def whole_results(case, found):
    """The results of all ranks as one process has them; shares of a sum are added."""
    axes = {"out": 1, "dq": 1, "dk": 1, "dv": 1, "lse": 2, "dbias": 2}
    whole = {}
    for name in found[0]:
        parts = [torch.from_numpy(each[name]) for each in found]
        axis = axes.get(name)
        if case.documents and axis is not None:
            parts = [part[None] for part in parts]
        shared = axis is None or (name == "dbias" and "row_bias" in case.extras)
        whole[name] = sum(parts) if shared else join(parts, dim=axis, layout=case.layout)
    return whole


def one_process(case):
    """{name: (exact, plain)}"""
    tensors = inputs(case)
    names = differentiable(tensors)
    rest = {name: tensor for name, tensor in tensors.items() if name not in (*names, "dout", "dlse")}

    def formula(*values):
        given = dict(zip(names, values, strict=True))
        q, k, v = (given.pop(name) for name in ("q", "k", "v"))
        if not case.documents:
            return reference.attention(q, k, v, **given, **rest, **case.options)
        starts = list(case.documents)
        out, lse = reference.attention_packed(q[0], k[0], v[0], starts, starts, **given, **rest, **case.options)
        return out[None], lse[None]

    exact, plain = exact_and_plain(formula, [tensors[name] for name in names], tensors["dout"], tensors["dlse"])
    return dict(zip(["out", "lse", *(f"d{name}" for name in names)], zip(exact, plain, strict=True), strict=True))


def test_repeats_are_cases():
    assert {case.id for case in CASES} >= REPEATS


@pytest.mark.parametrize("case", PARAMETERS)
def test_equals_one_process(pool, case):
    found = whole_results(case, pool.run(run_case, case, ranks=case.ranks))
    expected = one_process(case)
    assert set(found) == set(expected)
    for name, (exact, plain) in expected.items():
        assert_close(found[name].to(exact.dtype), exact, plain, name)


def test_bits_do_not_depend_on_timing(pool):
    case = Case("slow", options=CAUSAL, dtype=torch.bfloat16)
    first = pool.run(run_case, case)
    again = pool.run(run_slowed, case)
    for one, other in zip(first, again, strict=True):
        for name in one:
            assert numpy.array_equal(one[name], other[name]), name


def run_slowed(group, case):
    """Every rank comes late to its messages, each in another way."""
    import random
    import time

    import torch.distributed as dist
    from flash_attention.parallel import peers

    delays = random.Random(dist.get_rank(group))
    post = peers.Peers.post

    def late(self, *arguments):
        time.sleep(delays.random() / 50)
        return post(self, *arguments)

    peers.Peers.post = late
    try:
        return run_case(group, case)
    finally:
        peers.Peers.post = post


def run_with_hidden(group, method, value):
    """Keys that key_lengths hide hold `value`."""
    import torch.distributed as dist
    from flash_attention.parallel import context_attention, split

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    case = Case("hidden", extras=("key_lengths",))
    tensors = inputs(case)
    for b, length in enumerate(tensors["key_lengths"].tolist()):
        tensors["k"][b, length:] = tensors["v"][b, length:] = value
    q, k, v = (split(tensors[name], world, rank).requires_grad_() for name in ("q", "k", "v"))
    out = context_attention(q, k, v, group, method=method, key_lengths=tensors["key_lengths"])
    out.sum().backward()
    return [tensor.detach().numpy() for tensor in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("method", [*BOTH, "ulysses"])
def test_what_is_hidden_reaches_nothing(pool, method):
    plain, poisoned = (pool.run(run_with_hidden, method, value, ranks=2) for value in (0.0, float("nan")))
    for one, other in zip(plain, poisoned, strict=True):
        assert all(numpy.array_equal(a, b) for a, b in zip(one, other, strict=True))
