"""Hugging Face transformers: tiny random models give the same logits, tokens and gradients as with eager attention."""

import inspect

import flash_attention
import pytest
import torch

transformers = pytest.importorskip("transformers")

from flash_attention import hugging_face, hugging_face_masks  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OLD_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CHUNKS = {"intermediate_size_mlp": 32, "attention_chunk_size": 8, "interleave_moe_layer_step": 1, "no_rope_layers": [1, 1]}
MODELS = {
    "llama": {}, "mistral": WINDOW, "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "qwen3": {},
    "gemma": {}, "gemma2": WINDOW, "gemma3_text": {**WINDOW, "sliding_window_pattern": 2}, "phi": {}, "phi3": WINDOW,
    "gpt2": OLD_SIZES, "gpt_neox": {}, "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32}, "olmo2": {}, "cohere2": WINDOW,
    "starcoder2": WINDOW, "stablelm": {}, "granite": {}, "mixtral": {**WINDOW, **EXPERTS}, "gpt_oss": {**WINDOW, **EXPERTS},
    "smollm3": {}, "glm": {}, "llama4_text": {**EXPERTS, **CHUNKS}, "gpt_bigcode": OLD_SIZES, "nemotron": {},
}  # fmt: skip
# What they ask of attention, another model asks, too; to import their code takes seconds.
LIKE_OTHERS = (
    "qwen2", "qwen3", "gemma", "phi3", "gpt_neox", "olmo2", "starcoder2", "stablelm", "mixtral", "smollm3", "glm",
    "nemotron",
)  # fmt: skip
COMPILED = ("llama", "mistral", "gemma3_text")  # of which compiled code is tested every time: no mask, one, and two of them
REFUSED = {
    "codegen": {**OLD_SIZES, "rotary_dim": 4}, "bloom": {"n_layer": 2, "n_head": 4}, "gptj": {**OLD_SIZES, "rotary_dim": 4},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32}, "falcon": {"head_dim": None},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
}  # fmt: skip
TOKENS = 19
# transformers 5.17 itself has no masks in chunks for a static cache: its own call has an argument too many.
MASKS_IN_CHUNKS = inspect.signature(transformers.masking_utils.create_chunked_causal_mask).parameters
CACHES = {} if "block_sequence_ids" in MASKS_IN_CHUNKS else {"llama4_text": ("dynamic",)}


def build(kind, changes, implementation):
    known = transformers.CONFIG_MAPPING
    if kind not in known:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    sizes = {name: value for name, value in {**SIZES, **changes}.items() if value is not None}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(known[kind](**sizes), attn_implementation=implementation)
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def _registered():
    flash_attention.register_transformers()
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def padded_tokens(side):
    tokens, mask = torch.randint(3, 64, (2, TOKENS)), torch.ones(2, TOKENS, dtype=torch.int64)
    mask[0, slice(0, 7) if side == "left" else slice(TOKENS - 7, None)] = 0
    return tokens, mask


def assert_close(ours, eager, what):
    error, size = (ours - eager).abs().max().item(), eager.abs().max().item()
    assert error <= 1e-5 + 1e-4 * size, f"{what}: error {error:.3g} of {size:.3g}"


@pytest.mark.filterwarnings("ignore:flash_attention:UserWarning")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long_tail if kind in LIKE_OTHERS else ()) for kind in MODELS]
)
def test_model(kind, device):
    """Logits without and with padding on either side, greedy tokens with both kinds of cache, gradients."""
    eager = build(kind, MODELS[kind], "eager").to(device)
    ours = build(kind, MODELS[kind], "exact_attention").to(device)
    ours.load_state_dict(eager.state_dict())
    calls = []
    with torch.no_grad():
        for side in ("left", "right"):
            tokens, mask = (tensor.to(device) for tensor in padded_tokens(side))
            seen = mask.bool()
            logits = [model(tokens, attention_mask=mask).logits[seen] for model in (ours, eager)]
            assert_close(*logits, f"logits, padding on the {side}")
        tokens, mask = (tensor.to(device) for tensor in padded_tokens("left"))
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = eager.generate(tokens, **options)
        for cache in CACHES.get(kind, ("dynamic", "static")):
            found = ours.generate(tokens, cache_implementation=cache, disable_compile=True, **options)
            assert torch.equal(found, expected), f"tokens with a {cache} cache"
    for model in (eager, ours):
        logits = model(tokens).logits
        calls.append(logits.detach())
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert_close(calls[1], calls[0], "logits")
    for (name, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if b.grad is not None:
            assert_close(a.grad, b.grad, f"gradient of {name}")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long_tail if kind not in COMPILED else ()) for kind in MODELS]
)
def test_compiles_to_one_graph(kind):
    """Logits and gradients without a graph break, of tokens that are padded."""
    torch._dynamo.reset()
    eager, ours = build(kind, MODELS[kind], "eager"), build(kind, MODELS[kind], "exact_attention")
    ours.load_state_dict(eager.state_dict())
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    tokens, mask = padded_tokens("right")
    seen = mask.bool()
    logits = [model(tokens, attention_mask=mask).logits[seen] for model in (compiled, eager)]
    assert_close(*logits, "logits")
    for found in logits:
        found.square().sum().backward()
    for (name, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if b.grad is not None:
            assert_close(a.grad, b.grad, f"gradient of {name}")


@pytest.mark.parametrize("name", hugging_face.NAMES)
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_would_not_call_us_are_refused(kind, name):
    with pytest.raises(ValueError, match=f'attn_implementation: got "{name}"; .*eager'):
        build(kind, REFUSED[kind], name)
    build(kind, REFUSED[kind], "eager")


def test_the_first_name_serves_too():
    eager, ours = build("llama", {}, "eager"), build("llama", {}, "flash_attention")
    tokens, mask = padded_tokens("left")
    seen = mask.bool()
    with torch.no_grad():
        assert_close(
            ours(tokens, attention_mask=mask).logits[seen], eager(tokens, attention_mask=mask).logits[seen], "logits"
        )


def options_of(model, monkeypatch, **inputs):
    """What attention() is asked for, layer by layer."""
    asked = []
    original = hugging_face.padded

    def record(q, k, v, **options):
        asked.append(options)
        return original(q, k, v, **options)

    monkeypatch.setattr(hugging_face, "padded", record)
    with torch.no_grad():
        model(**inputs)
    return asked


def test_windows_and_padding_stay_small(monkeypatch):
    """They reach the kernel as a window and lengths: nothing that is asked for grows with the square of the tokens."""
    model = build("mistral", {**WINDOW, "max_position_embeddings": 512}, "exact_attention")
    tokens, mask = torch.randint(3, 64, (2, 300)), torch.ones(2, 300, dtype=torch.int64)
    expected = {"none": None, "right": "key_lengths", "left": "mask"}
    for side, option in expected.items():
        mask[:] = 1
        if side != "none":
            mask[0, :70] = side == "right"
            mask[0, -70:] = side == "left"
        for options in options_of(model, monkeypatch, input_ids=tokens, attention_mask=mask):
            assert options["window"] == (7, 0)
            extras = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
            assert list(extras) == ([option] if option else [])
            assert all(value.numel() <= 2 * 300 for value in extras.values())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_are_decoded_by_the_kernel_for_few_queries(cache, monkeypatch):
    model = build("llama", {"max_position_embeddings": 512}, "exact_attention")
    seen = []
    original = hugging_face.padded

    def record(q, k, v, **options):
        if q.shape[2] == 1:
            seen.append(flash_attention.explain(q, k, v, **options))
        return original(q, k, v, **options)

    monkeypatch.setattr(hugging_face, "padded", record)
    tokens = torch.randint(3, 64, (2, 150))
    model.generate(
        tokens, cache_implementation=cache, disable_compile=True, max_new_tokens=3, do_sample=False, eos_token_id=None
    )
    assert len(seen) == 2 * 2 and all("\nkernel     cpu/decode\n" in text for text in seen)


def test_a_lazy_mask_is_the_dense_one_to_everybody_else():
    functions = transformers.masking_utils
    tokens = torch.ones(2, 12, dtype=torch.bool)
    tokens[0, :3] = False
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 12, "q_offset": 7, "kv_offset": 0, "attention_mask": tokens}
    arguments["mask_function"] = functions.sliding_window_causal_mask_function(4)
    lazy, dense = hugging_face_masks.make_mask(**arguments), functions.sdpa_mask(**arguments)
    assert isinstance(lazy, hugging_face_masks.LazyMask) and lazy.shape == dense.shape and lazy.dtype == torch.bool
    for use in (lambda m: m[..., :9], lambda m: torch.where(m, 0.0, -1.0), lambda m: ~m, lambda m: m.float() * 2):
        result = use(lazy)
        assert type(result) is torch.Tensor and torch.equal(result, use(dense))


def test_chunks_reach_the_kernel_as_chunks(monkeypatch):
    model = build("llama4_text", MODELS["llama4_text"], "exact_attention")
    tokens, mask = torch.randint(3, 64, (2, TOKENS)), torch.ones(2, TOKENS, dtype=torch.int64)
    mask[0, -5:] = 0
    for inputs, option in (({}, []), ({"attention_mask": mask}, ["key_lengths"])):
        for options in options_of(model, monkeypatch, input_ids=tokens, **inputs):
            assert options["attention_chunk"] == 8 and options["window"] == (-1, 0)
            assert [name for name, value in options.items() if isinstance(value, torch.Tensor)] == option


def test_what_falls_back_says_so_once_by_name(recwarn):
    """Chunks that are counted from the first token of a sequence that is padded on its left."""
    hugging_face_masks._told.clear()
    model = build("llama4_text", MODELS["llama4_text"], "exact_attention")
    tokens, mask = torch.randint(3, 64, (2, TOKENS)), torch.ones(2, TOKENS, dtype=torch.int64)
    mask[0, :5] = 0
    with torch.no_grad():
        for _ in range(2):
            model(tokens, attention_mask=mask)
    ours = [str(warning.message) for warning in recwarn if "flash_attention" in str(warning.message)]
    assert len(ours) == 1 and "chunked_overlay" in ours[0]


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


def test_invariant_bits_for_all_models():
    """A row has the bits of attention(invariant=True), prefilled and decoded; the next registration undoes it."""
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 2, 4, 300, 64).bfloat16()
    want = flash_attention.attention(q, k, v, layout="bhsd", causal=True, invariant=True).transpose(1, 2)
    try:
        flash_attention.register_transformers(invariant=True)
        for name in hugging_face.NAMES:
            forward = transformers.AttentionInterface()[name]
            assert torch.equal(forward(module, q, k, v, None)[0], want)
            assert torch.equal(forward(module, q[:1, :, -1:], k[:1], v[:1], None)[0][0, 0], want[0, -1])
        flash_attention.register_transformers(invariant=False)
        found = transformers.AttentionInterface()["exact_attention"](module, q[:1, :, -1:], k[:1], v[:1], None)[0]
        plain = flash_attention.attention(q[:1, :, -1:], k[:1], v[:1], layout="bhsd", invariant=False)
        assert torch.equal(found, plain.transpose(1, 2))
        with pytest.raises(TypeError, match="invariant: expected a bool or None, got int"):
            flash_attention.register_transformers(invariant=1)
    finally:
        flash_attention.register_transformers()
