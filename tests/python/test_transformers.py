"""Hugging Face transformers: tiny random models give the same logits and tokens as with eager attention."""

import flash_attention
import pytest
import torch

transformers = pytest.importorskip("transformers")

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64),
}


@pytest.fixture(params=CONFIGS)
def models(request, device):
    flash_attention.register_transformers()
    torch.manual_seed(0)
    config = CONFIGS[request.param]()
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention").eval()
    ours.load_state_dict(eager.state_dict())
    return eager.to(device), ours.to(device)


@pytest.fixture
def tokens(device):
    return torch.randint(1, 64, (2, 19), device=device)


def test_logits(models, tokens):
    eager, ours = (model(tokens).logits for model in models)
    torch.testing.assert_close(ours, eager, atol=2e-5, rtol=1e-4)


def test_logits_with_padding(models, tokens):
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    eager, ours = (model(tokens, attention_mask=mask).logits for model in models)
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()], atol=2e-5, rtol=1e-4)


def test_generate(models, tokens):
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    eager, ours = (model.generate(tokens, **options) for model in models)
    assert torch.equal(eager, ours)


def test_training_step(models, tokens):
    for model in models:
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model(tokens, labels=tokens).loss.backward()
    eager, ours = models
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-3)


def test_sequences_end_to_end(device):
    """Packed sequences, as padding-free training passes them, see themselves alone."""
    from flash_attention.hugging_face import attention_forward

    q, k, v = (torch.randn(1, 4, 15, 16, device=device) for _ in range(3))
    starts = torch.tensor([0, 6, 15], dtype=torch.int32, device=device)
    out, _ = attention_forward(torch.nn.Module(), q, k, v, None, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    for begin, end in ((0, 6), (6, 15)):
        part = (tensor[:, :, begin:end] for tensor in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True)
        torch.testing.assert_close(out[:, begin:end], expected.transpose(1, 2), atol=1e-5, rtol=1e-4)
