"""Bad input, dead and silent peers: every rank gets an error that names rank and cause; none hangs."""

import os
import re
import time

import pytest
import torch
from parallel_pool import Failure, Pool


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4, timeout=20)
    yield pool
    pool.close()


def tensors(rows=16, heads=4, heads_kv=2, dim=16, dtype=torch.float32):
    return [torch.randn(1, rows, count, dim, dtype=dtype) for count in (heads, heads_kv, heads_kv)]


def call_with(group, changes, changed_rank, warm):
    """Rank `changed_rank` calls with `changes`, the others plainly; `warm`: after a good call of all."""
    import torch.distributed as dist
    from flash_attention.parallel import context_attention

    if warm:
        context_attention(*tensors(), group, causal=True)
    here = dist.get_rank(group) == changed_rank
    sizes, options = ({}, {"causal": True})
    if here or changed_rank is None:
        sizes = {name: value for name, value in changes.items() if name in ("rows", "heads", "heads_kv", "dim", "dtype")}
        options = options | {name: value for name, value in changes.items() if name not in sizes}
    q, k, v = tensors(**sizes)
    before = [tensor.clone() for tensor in (q, k, v)]
    try:
        context_attention(q, k, v, group, **options)
    finally:
        assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


def failures(pool, *arguments, ranks=None):
    pool.start(call_with, *arguments, ranks=ranks)
    found = pool.results(ranks, seconds=40)
    assert all(isinstance(each, Failure) for each in found), found
    return [each.message for each in found]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    "changes,name",
    [
        ({"rows": 24}, r"q.shape\[1\]"),
        ({"heads": 8, "heads_kv": 4}, r"q.shape\[2\]"),
        ({"dtype": torch.bfloat16}, "q.dtype"),
        ({"method": "all_gather"}, "method"),
        ({"window": (3, 0)}, "window"),
    ],
)
def test_ranks_that_differ(pool, changes, name, warm):
    for rank, message in enumerate(failures(pool, changes, 2, warm)):
        assert message.startswith(f"rank {rank} of 4: "), message
        assert re.search(name, message), message
        assert "rank 2" in message or rank == 2, message


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"rows": 15}, "q: got 15 rows; layout 'zigzag' cuts them in two"),
        ({"heads": 3}, "k: got 2 heads; allowed: a divisor of the 3 heads of q"),
        ({"method": "tree"}, "method: got 'tree'; allowed are"),
        ({"layout": "striped"}, "layout: got 'striped'; allowed are"),
        ({"mask": torch.ones(16, 16, dtype=torch.bool)}, "mask: got shape [16, 16]; it cannot be cut"),
        ({"mask": torch.ones(16, 64, dtype=torch.bool), "dropout_p": 0.1}, "its rows cannot be cut"),
        ({"bias": torch.ones(16, 64), "method": "ulysses"}, "its rows cannot be cut"),
        ({"sink": torch.ones(3)}, "sink: got shape [3]; expected [4]"),
        ({"dropout_p": 1.0}, "dropout_p: got 1.0"),
        ({"dim": 12}, "head_dim: got 12"),
    ],
)
def test_refused_arguments(pool, changes, text):
    for rank, message in enumerate(failures(pool, changes, None, False)):
        assert message.startswith(f"rank {rank} of 4: ") and text in message, message
    alone = failures(pool, changes, 1, False)
    assert text in alone[1]
    for rank in (0, 2, 3):
        assert "rank 1 refused its arguments" in alone[rank], alone[rank]


def test_documents_that_do_not_end_with_the_rows(pool):
    pool.start(call_documents)
    for rank, found in enumerate(pool.results()):
        assert found.message.startswith(
            f"rank {rank} of 4: cu_seqlens: got [0, 60]; expected numbers that rise from 0 to 64"
        )


def call_documents(group):
    from flash_attention.parallel import context_attention

    context_attention(*(tensor[0] for tensor in tensors()), group, cu_seqlens=[0, 60])


def die_in_the_middle(group, how, backward):
    """Rank 2 leaves in its second exchange; the others report how long they waited."""
    import torch.distributed as dist
    from flash_attention.parallel import context_attention, peers

    q, k, v = (tensor.requires_grad_() for tensor in tensors())
    out = context_attention(q, k, v, group, causal=True, method="ring", timeout=5)
    if dist.get_rank(group) == 2:
        post, count = peers.Peers.post, []

        def leave(self, *arguments):
            count.append(1)
            if len(count) == 2:
                if how == "dies":
                    os._exit(1)
                time.sleep(30)
            return post(self, *arguments)

        peers.Peers.post = leave
    began = time.monotonic()
    try:
        if backward:
            out.sum().backward()
        else:
            context_attention(q, k, v, group, causal=True, method="ring", timeout=5)
    except peers.ParallelError as error:
        assert q.grad is None
        return str(error), time.monotonic() - began
    return "no error", 0.0


@pytest.mark.parametrize("how,backward", [("dies", False), ("dies", True), ("sleeps", False)])
def test_a_rank_that_is_gone(how, backward):
    pool = Pool(4, timeout=20)
    try:
        pool.start(die_in_the_middle, how, backward)
        for rank in (0, 1, 3):
            assert pool.pipes[rank].poll(40), f"rank {rank} hangs"
            message, seconds = pool.pipes[rank].recv()
            assert message.startswith(f"rank {rank} of 4: ") and "rank " in message[10:], message
            assert "failed:" in message and seconds < 15, (message, seconds)
            print(message)
    finally:
        pool.close()
