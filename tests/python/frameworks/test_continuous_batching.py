"""Continuous batching of transformers: requests that share steps and pages get the tokens of eager generation."""

import flash_attention
import pytest
import torch

transformers = pytest.importorskip("transformers")
initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")
if not hasattr(transformers.ContinuousBatchingConfig(), "page_size"):
    pytest.skip("its continuous batching takes flash_attention_2 and 3 alone", allow_module_level=True)

from flash_attention import hugging_face  # noqa: E402
from test_transformers import MODELS, build  # noqa: E402

NEW = 5


@pytest.fixture(scope="module", autouse=True)
def _registered():
    flash_attention.register_transformers()
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def served(model, prompts, **options):
    config = transformers.ContinuousBatchingConfig(
        page_size=8, num_blocks=64, max_batch_tokens=40, use_cuda_graph=False, use_async_batching=False, **options
    )
    generation = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(
        inputs=prompts, generation_config=generation, continuous_batching_config=config, warmup=False
    )
    return [list(found[name].generated_tokens) for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]


@pytest.mark.filterwarnings("ignore:flash_attention:UserWarning")
@pytest.mark.parametrize(
    "kind, name, tables",
    [("llama", "flash_attention", False), ("mistral", "flash_attention", False), ("llama", "exact_flash_3", True)],
)
def test_tokens_are_those_of_eager(kind, name, tables, device, monkeypatch):
    """Prompts are read in chunks beside others that decode; with tables, steps of single tokens go to the pages."""
    eager, ours = (build(kind, MODELS[kind], implementation).to(device) for implementation in ("eager", name))
    ours.load_state_dict(eager.state_dict())
    torch.manual_seed(5)
    prompts = [torch.randint(3, 64, (length,)).tolist() for length in (5, 30, 1, 17, 26)]
    calls = []
    if tables:
        original = hugging_face._decode_in_pages
        monkeypatch.setattr(hugging_face, "_decode_in_pages", lambda *call: calls.append(1) or original(*call))
        # transformers looks for a GPU first; the kernels are here on the CPU, too.
        monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_, **__: None)
    found = served(ours, prompts, max_blocks_per_request=8 if tables else 0)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = eager.generate(torch.tensor([prompt], device=device), **options)[0, len(prompt) :]
        assert tokens == expected.tolist()
    assert bool(calls) == tables
