"""examples/train_llama.py: documents that do not see each other, shards, cut sequences and checkpoints."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel_pool import Pool
from torch.nn import functional as F

EXAMPLES = str(Path(__file__).resolve().parents[3] / "examples")
SIZES = {"width": 48, "heads": 6, "heads_kv": 2, "layers": 2, "hidden": 56, "seq": 96}
STEPS = 4


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


def example():
    sys.path.insert(0, EXAMPLES)
    import train_llama

    return train_llama


def documents():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(256, (length,), generator=generator) for length in (1, 2, 7, 23, 37, 41, 200)]


def mesh_of(data, context):
    return dist.init_device_mesh("cpu", (data, context), mesh_dim_names=("data", "context"))


def train(group, data, context, recompute=False, folder=None):
    config, mesh = example().Config(**SIZES), mesh_of(data, context)
    return example().train(config, mesh, documents(), STEPS, recompute, folder, keep_every=2, group=group)


def rotated(x, places):
    """By the formula, in complex numbers: pair p of a row at place i is turned by i * theta ^ (-2 p / head_dim)."""
    half = x.shape[-1] // 2
    angles = places.double()[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def logits_of(model, tokens):
    """One document through the weights of a model, in double precision, by torch's own operations."""
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    heads, heads_kv, dim = SIZES["heads"], SIZES["heads_kv"], SIZES["width"] // SIZES["heads"]

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[name], torch.finfo(torch.float32).eps)

    x, places = weights["embedding.weight"][tokens], torch.arange(len(tokens))
    hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    for n in range(SIZES["layers"]):
        name = f"blocks.{n}."
        qkv = norm(x, name + "norms.0.weight") @ weights[name + "attention.qkv.weight"].T
        q, k, v = qkv.unflatten(-1, (-1, dim)).split([heads, heads_kv, heads_kv], 1)
        k, v = (rows.repeat_interleave(heads // heads_kv, 1) for rows in (rotated(k, places), v))
        scores = torch.einsum("ihd,jhd->hij", rotated(q, places), k) / dim**0.5
        out = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1)
        x = x + out @ weights[name + "attention.out.weight"].T
        gate, up = (norm(x, name + "norms.1.weight") @ weights[name + "gate_up.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ weights[name + "down.weight"].T
    return norm(x, "norm.weight") @ weights["head.weight"].T


def first_loss(group):
    """(what the example computes, its weights, the tokens and where documents begin)"""
    module, mesh, config = example(), mesh_of(1, 1), example().Config(**SIZES)
    model, *_ = module.trainer(config, mesh, STEPS)
    with torch.no_grad():  # a model that is new would have nearly equal logits
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() == 2 else 1)
        batch = module.batch_of(documents(), config.seq, 0, 0, mesh["context"], "cpu")
        found = model(batch)[0]
        expected = torch.cat([logits_of(model, rows) for rows in batch.tokens.tensor_split(batch.starts[1:-1].long())])
    return found.numpy(), expected.numpy(), len(batch.starts)


def test_a_document_has_the_logits_that_it_has_alone(pool):
    found, expected, starts = pool.run(first_loss, ranks=1)[0]
    assert starts > 3
    assert abs(expected).max() > 0.5
    torch.testing.assert_close(torch.tensor(found).double(), torch.tensor(expected), atol=2e-4, rtol=2e-4)


def two_batches_in_one_process(group):
    """Both batches of each step, their gradients added up: what shards must give."""
    module, mesh, config = example(), mesh_of(1, 1), example().Config(**SIZES)
    model, optimizer, schedule = module.trainer(config, mesh, STEPS)
    losses = []
    for step in range(STEPS):
        batches = [module.batch_of(documents(), config.seq, step, turn, mesh["context"], "cpu") for turn in range(2)]
        tokens = sum(int((batch.labels >= 0).sum()) for batch in batches)
        total = sum(F.cross_entropy(model(batch)[0], batch.labels, reduction="sum") for batch in batches) / tokens
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("recompute", [False, True])
def test_shards_learn_as_one_process_does(pool, recompute):
    expected = pool.run(two_batches_in_one_process, ranks=1)[0]
    for losses in pool.run(train, 2, 1, recompute):
        assert losses == pytest.approx(expected, rel=2e-5)
    assert expected[-1] < expected[0]


def test_a_cut_sequence_learns_as_a_whole_one_does(pool):
    expected = pool.run(train, 1, 1, ranks=1)[0]
    for losses in pool.run(train, 1, 2):
        assert losses == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_goes_on_as_if_nothing_had_been(pool, processes, tmp_path):
    """Written by two processes, each with half of a sequence; read by as many, or by one."""
    losses = pool.run(train, 1, 2, False, tmp_path)[0]
    shutil.rmtree(tmp_path / f"step_{STEPS}")
    again = pool.run(train, 1, processes, False, tmp_path, ranks=processes)[0]
    assert again == pytest.approx(losses[2:], rel=2e-5)
