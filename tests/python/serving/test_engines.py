"""The backends of vLLM and SGLang: a few steps of serving, each output against attention over all tokens in fp64."""

import importlib
import importlib.metadata
import sys
import types

import pytest
import torch
from engine_stand_ins import install_sglang, install_vllm

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 4


def load(monkeypatch, name):
    path = f"flash_attention.engines.{name}"
    monkeypatch.delitem(sys.modules, path, raising=False)
    module = importlib.import_module(path)
    monkeypatch.setitem(sys.modules, path, module)
    return module


def exact(q, k, v, window=None, softcap=0.0, slopes=None, sink=None):
    """The last len(q) positions over all of k, v: [queries, heads, dim] in fp64, causal."""
    k, v = (x.double().repeat_interleave(HEADS // k.shape[1], 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None]
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * distance.abs()
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    s = s.masked_fill(hidden, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink.double()[:, None, None].expand(-1, len(q), 1)], -1)
    p = s.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", p, v)


class Sequence:
    """Tokens of one request, and the pages that they were given."""

    def __init__(self, pages, count):
        self.pages = pages
        self.q = torch.randn(count, HEADS, DIM)
        self.k, self.v = (torch.randn(count, KV_HEADS, DIM) for _ in range(2))

    def slots(self, begin, end):
        return [self.pages[i // PAGE] * PAGE + i % PAGE for i in range(begin, end)]


def sequences():
    return [Sequence([5, 2, 9], 11), Sequence([1], 3), Sequence([7, 3], 8)]


# Of each sequence in each step: tokens that are in the cache, and tokens after the step. A prefill, a mixed step, decoding.
STEPS = [[(0, 6), (0, 2), (0, 1)], [(6, 9), (2, 3), (1, 7)], [(9, 10), (2, 3), (7, 8)]]


def batch_of(everything, step):
    starts = torch.tensor([0, *torch.tensor([end - begin for begin, end in step]).cumsum(0)], dtype=torch.int32)
    rows = [torch.cat([getattr(s, name)[b:e] for s, (b, e) in zip(everything, step, strict=True)]) for name in "qkv"]
    slots = [slot for s, (b, e) in zip(everything, step, strict=True) for slot in s.slots(b, e)]
    return starts, rows, torch.tensor(slots), torch.tensor([end for _, end in step], dtype=torch.int32)


def expected_of(everything, step, **options):
    return torch.cat([exact(s.q[b:e], s.k[:e], s.v[:e], **options) for s, (b, e) in zip(everything, step, strict=True)])


OPTIONS = [
    {},
    {"window": 3},
    {"softcap": 5.0},
    {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.1])},
    {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
def test_vllm(options, monkeypatch):
    install_vllm(monkeypatch)
    module = load(monkeypatch, "vllm")
    slopes = options.get("slopes")
    impl = module.Backend.get_impl_cls()(
        HEADS,
        DIM,
        DIM**-0.5,
        KV_HEADS,
        alibi_slopes=None if slopes is None else slopes.tolist(),
        sliding_window=options.get("window"),
        logits_soft_cap=options.get("softcap"),
        sinks=options.get("sink"),
    )
    builder = module.Backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    cache = torch.full(module.Backend.get_kv_cache_shape(10, PAGE, KV_HEADS, DIM), torch.nan)
    everything = sequences()
    table = torch.full((3, 3), -1, dtype=torch.int32)
    for i, s in enumerate(everything):
        table[i, : len(s.pages)] = torch.tensor(s.pages)
    for step in STEPS:
        starts, (q, k, v), slots, lengths = batch_of(everything, step)
        tokens, padding = len(q), 2
        common = types.SimpleNamespace(
            num_actual_tokens=tokens,
            max_query_len=int(starts.diff().max()),
            query_start_loc=starts,
            seq_lens=lengths,
            block_table_tensor=table,
            slot_mapping=torch.cat([slots, torch.full((padding,), -1)]),
            causal=True,
        )
        metadata = builder.build(0, common)
        padded = [torch.cat([x, torch.full_like(x[:1], torch.nan).repeat(padding, 1, 1)]) for x in (q, k, v)]
        output = torch.full((tokens + padding, HEADS * DIM), 7.0)
        impl.forward(None, *padded, cache, metadata, output)
        assert (output[tokens:] == 7).all()
        torch.testing.assert_close(
            output[:tokens].view(tokens, HEADS, DIM).double(),
            expected_of(everything, step, **options),
            atol=1e-5,
            rtol=1e-4,
        )
    assert cache[:, 0].isnan().all() and cache[:, 8].isnan().all()  # pages of nobody are as they were


def test_vllm_padding_inside_a_captured_batch_writes_nothing(monkeypatch):
    install_vllm(monkeypatch)
    paged = importlib.import_module("flash_attention.engines.paged")
    for cache in (torch.randn(4, PAGE, KV_HEADS, DIM), torch.randn(4, KV_HEADS, PAGE, DIM).transpose(1, 2)):
        before = cache.clone()
        rows = torch.randn(3, KV_HEADS, DIM)
        paged.write_slots(cache, rows, torch.tensor([6, -1, 13]))
        changed = (cache != before).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[1, 2], [3, 1]]
        assert torch.equal(cache[1, 2], rows[0]) and torch.equal(cache[3, 1], rows[2])


def test_vllm_refuses_by_name(monkeypatch):
    install_vllm(monkeypatch)
    module = load(monkeypatch, "vllm")
    with pytest.raises(NotImplementedError, match=r"attn_type: got .*only decoders"):
        module.Impl(HEADS, DIM, 1.0, attn_type="encoder_only")
    with pytest.raises(NotImplementedError, match="kv_cache_dtype: got fp8"):
        module.Impl(HEADS, DIM, 1.0, kv_cache_dtype="fp8")
    out = torch.ones(2, HEADS * DIM)
    assert (module.Impl(HEADS, DIM, 1.0).forward(None, out, out, out, None, None, out) == 0).all()  # no metadata
    assert module.Backend.supports_dtype(torch.bfloat16) and not module.Backend.supports_head_size(584)


def test_vllm_registers_the_place_for_others_once(monkeypatch):
    overrides = install_vllm(monkeypatch)
    module = load(monkeypatch, "vllm")
    module.register()
    assert list(overrides.values()) == ["flash_attention.engines.vllm.Backend"]
    (key,) = overrides
    overrides[key] = "another.Backend"
    module.register()
    assert overrides[key] == "another.Backend"


class Mode:
    def __init__(self, decode):
        self.decode = decode

    def is_decode(self):
        return self.decode


class Pool:
    """SGLang's pool of tokens: a row for each."""

    def __init__(self):
        self.k, self.v = (torch.full((10 * PAGE, KV_HEADS, DIM), torch.nan) for _ in range(2))

    def set_kv_buffer(self, layer, where, k, v):
        self.k[where], self.v[where] = k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)

    def get_kv_buffer(self, layer_id):
        return self.k, self.v


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[2], OPTIONS[4]], ids=lambda o: next(iter(o), "plain"))
def test_sglang(options, page_size, graph, monkeypatch):
    install_sglang(monkeypatch)
    module = load(monkeypatch, "sglang")
    everything, pool = sequences(), Pool()
    req_to_token = torch.zeros(6, 12, dtype=torch.int32)
    requests = torch.tensor([4, 0, 2])
    for row, s in zip(requests, everything, strict=True):
        places = s.slots(0, len(s.pages) * PAGE)
        req_to_token[row, : len(places)] = torch.tensor(places)
    runner = types.SimpleNamespace(req_to_token_pool=types.SimpleNamespace(req_to_token=req_to_token), page_size=page_size)
    backend = module.Backend(runner)
    window = options.get("window")
    layer = types.SimpleNamespace(
        layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=DIM**-0.5,
        logit_cap=options.get("softcap", 0.0), sliding_window_size=-1 if window is None else window - 1,
    )  # fmt: skip
    backend.init_cuda_graph_state(8, 8)
    for step in STEPS:
        starts, (q, k, v), slots, lengths = batch_of(everything, step)
        decode = len(q) == len(step)
        batch = types.SimpleNamespace(
            forward_mode=Mode(decode), seq_lens=lengths.long(), req_pool_indices=requests, extend_seq_lens=starts.diff(),
            out_cache_loc=slots, token_to_kv_pool=pool, spec_info=None,
        )  # fmt: skip
        if graph and decode:
            arguments = (3, requests, batch.seq_lens)
            backend.init_forward_metadata_capture_cuda_graph(3, 3, *arguments[1:], None, batch.forward_mode, None)
            captured = backend.metadata.table.data_ptr()
            backend.init_forward_metadata_replay_cuda_graph(*arguments, 0, None, batch.forward_mode, None, None)
            assert backend.metadata.table.data_ptr() == captured
        else:
            backend.init_forward_metadata(batch)
        sinks = {"sinks": options["sink"]} if "sink" in options else {}
        out = backend.forward(q.flatten(1), k.flatten(1), v.flatten(1), layer, batch, **sinks)
        expected = expected_of(everything, step, **options)
        torch.testing.assert_close(out.view(-1, HEADS, DIM).double(), expected, atol=1e-5, rtol=1e-4)


def test_sglang_registers_a_name(monkeypatch):
    backends, choices = install_sglang(monkeypatch)
    module = load(monkeypatch, "sglang")
    module.register()
    assert backends == {module.NAME: module.Backend} and choices == [module.NAME]


@pytest.mark.parametrize("group, name", [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_the_engines_find_them(group, name):
    (found,) = [e for e in importlib.metadata.entry_points(group=group) if e.value.startswith("flash_attention.")]
    assert found.value == f"flash_attention.engines.{name}:register"
