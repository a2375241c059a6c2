"""Models that train with context parallelism: the same losses and gradients as one process with eager attention."""

import sys
from pathlib import Path

import pytest
import torch
from parallel_pool import Pool

transformers = pytest.importorskip("transformers")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


def make_model(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def batch_of(kind):
    tokens = torch.randint(1, 64, (1 if kind == "documents" else 2, 32), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if kind == "odd":
        batch = {name: tensor[:, :29] for name, tensor in batch.items()}
    if kind == "padded":
        batch["attention_mask"] = (torch.arange(32) < torch.tensor([[32], [21]])).long()
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    if kind == "documents":
        batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(23)])[None]
        batch["labels"][0, 9] = -100  # the first token of a document is not predicted from the one before
    return batch


def train(group, kind, layout):
    """(loss, {name: gradient}) of one step, gradients added up over the ranks."""
    import torch.distributed as dist
    from flash_attention.parallel import parallelize_transformers

    model = parallelize_transformers(make_model(), group, layout=layout, gradients="sum")
    loss = model(**batch_of(kind)).loss
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=group)
        gradients[name] = parameter.grad.numpy()
    return loss.item(), gradients


@pytest.mark.parametrize(
    "kind,layout", [("plain", "zigzag"), ("odd", "contiguous"), ("padded", "zigzag"), ("documents", "zigzag")]
)
def test_one_call_makes_a_model_parallel(pool, kind, layout):
    model = make_model()
    expected = model(**batch_of(kind), use_cache=False).loss  # with a cache transformers does not look for documents
    expected.backward()
    for loss, gradients in pool.run(train, kind, layout):
        assert loss == pytest.approx(expected.item(), rel=2e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.from_numpy(gradients[name]), parameter.grad, atol=2e-5, rtol=1e-3, msg=name)


def left_padded(group):
    from flash_attention.parallel import ParallelError, parallelize_transformers

    model = parallelize_transformers(make_model(), group)
    mask = torch.ones(2, 32)
    mask[0, :3] = 0
    try:
        model(batch_of("plain")["input_ids"], attention_mask=mask)
    except ParallelError as error:
        return str(error)


def test_a_mask_that_cannot_be_cut_is_refused(pool):
    for message in pool.run(left_padded):
        assert message.startswith("attention_mask: got shape [2, 32]; it cannot be cut"), message


def example(group, folder):
    sys.path.insert(0, folder)
    import train_long_context

    return train_long_context.losses(group, torch.device("cpu"), seq=64, steps=4)


def test_losses_of_the_example_are_those_of_one_process(pool):
    alone = pool.run(example, str(EXAMPLES), ranks=1)[0]
    together = pool.run(example, str(EXAMPLES))
    assert together[0] == together[1]
    assert together[0] == pytest.approx(alone, rel=2e-4)
    assert alone[-1] < alone[0]
