"""SGLang's backend with the real package's classes: its base class, modes, batches, layers, pools and drafts.

What a scheduler and a model runner make around them is here.
"""

import dataclasses
import importlib
import importlib.metadata
import sys
import types

import engine_wheels
import pytest
import torch
from serving_steps import DIM, HEADS, KV_HEADS, OPTIONS, PAGE, STEPS, batch_of, expected_of, name_of, sequences


class Engine:
    """What a test needs of SGLang, and the plug-in loaded over it."""

    def __init__(self):
        self.wheel = wheel = engine_wheels.Wheel("sglang")
        take = wheel.take
        batch = take(
            "srt.model_executor.forward_batch_info", "ForwardMode", "ForwardBatch",
            ForwardBatchDeepSeekMHAMixin=type("ForwardBatchDeepSeekMHAMixin", (), {}),
        )  # fmt: skip
        self.ForwardMode, self.ForwardBatch = batch.ForwardMode, batch.ForwardBatch
        take(
            "srt.layers.attention.base_attn_backend", "SharedReadEnds", "AttentionBackend",
            debug_kernel_api=lambda function: function, is_npu=lambda: False,
        )  # fmt: skip
        self.backends = take(
            "srt.layers.attention.attention_registry", "ATTENTION_BACKENDS", "register_attention_backend"
        ).ATTENTION_BACKENDS
        layers = take(
            "srt.layers.radix_attention", "AttentionType", "RadixAttention", eager_on_graph=lambda function: function
        )
        self.AttentionType, self.RadixAttention = layers.AttentionType, layers.RadixAttention
        quantised = "KVCacheQuantMethodBase", "UnquantizedKVCacheMethod"
        self.unquantised = take("srt.layers.quantization.fp4_kv_cache_quant_method", *quantised).UnquantizedKVCacheMethod
        pools = "KVWriteLoc", "unwrap_write_loc", "write_loc_is_physical", "KVCache", "MHATokenToKVPool"
        self.MHATokenToKVPool = take(
            "srt.mem_cache.memory_pool", *pools, UnquantizedKVCacheMethod=self.unquantised, _is_npu=False, _is_cuda=False,
            maybe_detect_oob=lambda *_: None,
        ).MHATokenToKVPool  # fmt: skip
        take("srt.mem_cache.base_swa_memory_pool", "BaseSWAKVPool")
        none = type("MLATokenToKVPool", (), {})
        self.SWAKVPool = take("srt.mem_cache.swa_memory_pool", "SWAKVPool", MLATokenToKVPool=none).SWAKVPool
        take("srt.mem_cache.kv_loc_plan", "IdSpaceKind")
        take("srt.speculative.spec_info", "SpecInputType", "SpecInput")
        self.EagleVerifyInput = take("srt.speculative.eagle_info", "EagleVerifyInput").EagleVerifyInput
        kinds = "", "deterministic_", "radix_supported_deterministic_"
        adders = [f"add_{kind}attention_backend_choices" for kind in kinds]
        lists = [f"{kind.upper()}ATTENTION_BACKEND{'' if kind.startswith('radix') else '_CHOICES'}" for kind in kinds]
        choices = take("srt.arg_groups.choices", *lists, *adders)
        self.of_deterministic = [getattr(choices, name) for name in lists[1:]]
        self.choices = choices.ATTENTION_BACKEND_CHOICES
        server_args = (wheel.root / "sglang/srt/server_args.py").read_text()
        assert all(f"\n    {name},\n" in server_args for name in adders)  # imported there
        sys.modules["sglang.srt.server_args"] = choices
        sys.modules.pop("flash_attention.engines.sglang", None)
        self.plugin = importlib.import_module("flash_attention.engines.sglang")

    def pool(self, page_size, dtype=torch.float32, layout=None, layers=2):
        """Real methods over buffers of NaN: the constructor needs a GPU's allocator. What stores rows is a kernel there."""

        class Pool(self.MHATokenToKVPool):
            def __init__(self):
                pass

            def _store_kv_layer(self, layer, slots, k, v):
                self.k_buffer[layer][slots] = k
                self.v_buffer[layer][slots] = v

        pool = Pool()
        pool.start_layer, pool.size, pool.page_size, pool.dtype = 0, 10 * PAGE, page_size, dtype
        pool.store_dtype = torch.uint8 if dtype.itemsize == 1 else dtype
        pool.quant_method, pool.layer_transfer_counter = self.unquantised(), None
        pool.use_hnd = layout == "hnd"
        pool.k_scale_buffer = pool.v_scale_buffer = None
        pool.head_dim = pool.v_head_dim = DIM
        shape = (10 * PAGE // page_size, KV_HEADS, page_size, DIM) if pool.use_hnd else (10 * PAGE, KV_HEADS, DIM)
        pool.k_buffer, pool.v_buffer = (
            [torch.full(shape, 255, dtype=torch.uint8) if dtype.itemsize == 1 else torch.full(shape, torch.nan)
             for _ in range(layers)] for _ in range(2)
        )  # fmt: skip
        return pool

    def window_pool(self, page_size):
        """Layer 0 sees all keys and layer 1 a window, whose pool has its pages in another order."""
        pool = object.__new__(self.SWAKVPool)
        pool.full_kv_pool, pool.swa_kv_pool = self.pool(page_size, layers=1), self.pool(page_size, layers=1)
        pool.layers_mapping, pool.layer_transfer_counter = {0: (0, False), 1: (0, True)}, None
        pages = torch.randperm(10 * PAGE // page_size)
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
        pool.register_mapping(torch.cat([slots, torch.tensor([-1])]))
        return pool

    def backend(self, pool, everything, page_size, **fields):
        """(backend, the rows of the requests in SGLang's table)."""
        req_to_token = torch.zeros(6, 12, dtype=torch.int32)
        requests = torch.tensor([4, 0, 2])
        for row, s in zip(requests, everything, strict=True):
            places = s.slots(0, len(s.pages) * PAGE)
            req_to_token[row, : len(places)] = torch.tensor(places)
        table = types.SimpleNamespace(req_to_token=req_to_token)
        runner = types.SimpleNamespace(req_to_token_pool=table, token_to_kv_pool=pool, page_size=page_size, **fields)
        return self.backends[self.plugin.NAME](runner), requests

    def layer(self, options, layer_id=0, **more):
        window = options.get("window")
        return self.RadixAttention(
            HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id, options.get("softcap", 0.0),
            sliding_window_size=-1 if window is None else window - 1, **more,
        )  # fmt: skip

    def batch(self, step, everything, requests):
        """(batch, q, k, v): as the scheduler makes it for that kind of step."""
        starts, (q, k, v), slots, lengths = batch_of(everything, STEPS[step])
        lengths, added, count = lengths.long(), starts.diff(), len(lengths)
        mode, spec = (
            self.ForwardMode.EXTEND
            if step == "prefill"
            else self.ForwardMode[{"verify": "TARGET_VERIFY"}.get(step, step.upper())],
            None,
        )
        if step == "verify":
            lengths = lengths - added  # SGLang does not count what is verified
            spec = self.EagleVerifyInput(
                *[None] * 7, spec_steps=1, topk=1, draft_token_num=int(added[0]), capture_hidden_mode=None, seq_lens_sum=0,
                seq_lens_cpu=None,
            )  # fmt: skip
        batch = self.ForwardBatch(mode, count, torch.zeros(len(q)), requests, lengths, slots, int(lengths.sum()))
        batch.seq_lens_cpu, batch.spec_info = lengths, spec
        if step in ("prefill", "mixed"):
            batch.extend_seq_lens, batch.extend_seq_lens_cpu = added, added.tolist()
        return batch, q, k, v


@pytest.fixture(scope="module")
def engine():
    made = Engine()
    made.plugin.register()
    yield made
    made.wheel.close()


def attend(engine, backend, batch, layer, q, k, v, **options):
    sinks = {"sinks": options["sink"]} if "sink" in options else {}
    rows = [x.flatten(1).clone() for x in (q, k, v)]
    rows[1:] = [x.view(-1, KV_HEADS, DIM) for x in rows[1:]]  # as RadixAttention.forward() hands them on
    return backend.forward(*rows, layer, batch, **sinks).view(-1, HEADS, DIM).double()


@pytest.mark.parametrize("page_size, layout", [(1, None), (PAGE, None), (PAGE, "hnd")])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("options", [o for o in OPTIONS if "slopes" not in o], ids=name_of)
def test_steps(options, graph, page_size, layout, engine):
    """In a graph the metadata of decoding and verifying stays where it was captured."""
    everything, pool = sequences(), engine.pool(page_size, layout=layout)
    backend, requests = engine.backend(pool, everything, page_size)
    backend.init_cuda_graph_state(8, 16)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    for step in STEPS:
        batch, q, k, v = engine.batch(step, everything, requests)
        if graph and step in ("decode", "verify"):
            earlier = dataclasses.replace(
                batch, seq_lens=torch.ones_like(batch.seq_lens), req_pool_indices=requests.flip(0)
            )
            backend.init_forward_metadata_out_graph(earlier, in_capture=True)
            captured = backend.forward_metadata
            backend.init_forward_metadata_in_graph(earlier)
            backend.init_forward_metadata_out_graph(batch)
            for field in ("table", "lengths", "starts"):
                assert getattr(captured, field).data_ptr() == getattr(backend.forward_metadata, field).data_ptr()
            backend.forward_metadata = captured
        else:
            backend.init_forward_metadata(batch)
        out = attend(engine, backend, batch, engine.layer(options, 1), q, k, v, **options)
        torch.testing.assert_close(out, expected_of(everything, STEPS[step], **options), atol=1e-5, rtol=1e-4)
    assert pool.k_buffer[0].isnan().all()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("page_size", [1, PAGE])
def test_layers_with_windows_have_a_pool(page_size, graph, engine):
    """Both pools, in each step, in different slots."""
    everything, pool = sequences(), engine.window_pool(page_size)
    backend, requests = engine.backend(pool, everything, page_size)
    backend.init_cuda_graph_state(8, 16)
    for step in STEPS:
        batch, q, k, v = engine.batch(step, everything, requests)
        if graph and step in ("decode", "verify"):
            backend.init_forward_metadata_out_graph(batch)
        else:
            backend.init_forward_metadata(batch)
        for layer, options in enumerate(({}, {"window": 3})):
            out = attend(engine, backend, batch, engine.layer(options, layer), q, k, v)
            torch.testing.assert_close(out, expected_of(everything, STEPS[step], **options), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_caches_of_eight_bits(codes, scaled, engine):
    """SGLang's pool rounds; the oracle has the values of its codes."""
    everything, pool = sequences(), engine.pool(PAGE, codes)
    backend, requests = engine.backend(pool, everything, PAGE)
    layer, scales = engine.layer({}), (0.5, 0.25) if scaled else (1.0, 1.0)
    if scaled:
        layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(scale), requires_grad=False) for scale in scales)
    for step in STEPS:
        batch, q, k, v = engine.batch(step, everything, requests)
        backend.init_forward_metadata(batch)
        out = attend(engine, backend, batch, layer, q, k, v)
        for s in everything:
            s.k, s.v = ((x / scale).to(codes).float() * scale for x, scale in zip((s.k, s.v), scales, strict=True))
        torch.testing.assert_close(out, expected_of(everything, STEPS[step]), atol=1e-5, rtol=1e-4)


def test_layers_that_see_their_chunk(engine):
    """Llama 4's: a query sees the keys of its own chunk of positions."""
    everything = sequences()
    backend, requests = engine.backend(engine.pool(PAGE), everything, PAGE, attention_chunk_size=4)
    batch, q, k, v = engine.batch("prefill", everything, requests)
    backend.init_forward_metadata(batch)
    out = attend(engine, backend, batch, engine.layer({}, use_irope=True), q, k, v)
    first = everything[0]
    parts = torch.cat(
        [
            expected_of([first], [(0, 4)]),
            expected_of([types.SimpleNamespace(q=first.q[4:], k=first.k[4:], v=first.v[4:])], [(0, 2)]),
        ]
    )
    torch.testing.assert_close(out[:6], parts, atol=1e-5, rtol=1e-4)


def test_nothing_is_written_unless_asked(engine):
    everything, pool = sequences(), engine.pool(PAGE)
    backend, requests = engine.backend(pool, everything, PAGE)
    batch, q, k, v = engine.batch("prefill", everything, requests)
    backend.init_forward_metadata(batch)
    layer = engine.layer({})
    attend(engine, backend, batch, layer, q, k, v)
    before = pool.k_buffer[0].clone()
    out = backend.forward(q.flatten(1), 2 * k, 2 * v, layer, batch, save_kv_cache=False)
    torch.testing.assert_close(
        out.view(-1, HEADS, DIM).double(), expected_of(everything, STEPS["prefill"]), atol=1e-5, rtol=1e-4
    )
    assert torch.equal(pool.k_buffer[0].nan_to_num(), before.nan_to_num())


def test_refusals(engine):
    everything = sequences()
    backend, requests = engine.backend(engine.pool(PAGE), everything, PAGE)
    batch, q, k, v = engine.batch("verify", everything, requests)
    tree = dataclasses.replace(batch, spec_info=dataclasses.replace(batch.spec_info, topk=4))
    with pytest.raises(NotImplementedError, match="spec_info: chains of one length"):
        backend.init_forward_metadata(tree)
    with pytest.raises(NotImplementedError, match="spec_info: this backend verifies"):
        backend.init_forward_metadata(dataclasses.replace(batch, forward_mode=engine.ForwardMode.DECODE))
    prefill, q, k, v = engine.batch("prefill", everything, requests)
    backend.init_cuda_graph_state(8, 16)
    with pytest.raises(NotImplementedError, match="forward_mode: decoding and target_verify are captured"):
        backend.init_forward_metadata_out_graph(prefill, in_capture=True)
    backend.init_forward_metadata(prefill)
    for changes, message in [
        ({"is_cross_attention": True}, "is_cross_attention"),
        ({"attn_type": engine.AttentionType.DECODER_BIDIRECTIONAL}, "attn_type"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            backend.forward(q, k, v, engine.layer({}, **changes), prefill)
    with pytest.raises(NotImplementedError, match="k_rope: is not supported by flash_attention_library"):
        backend.forward(q, k, v, engine.layer({}), prefill, k_rope=k)
    for fields, message in [
        ({"use_mla_backend": True}, "use_mla_backend"),
        ({"kv_index_translator": types.SimpleNamespace(is_translating=True)}, "enable_unified_memory"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            engine.backend(engine.pool(PAGE), everything, PAGE, **fields)


def test_registration(engine):
    assert engine.backends[engine.plugin.NAME] is engine.plugin.Backend
    assert engine.plugin.NAME in engine.choices
    assert all(engine.plugin.NAME in names for names in engine.of_deterministic)
    (found,) = [e for e in importlib.metadata.entry_points(group="sglang.srt.plugins") if "flash_attention" in e.value]
    assert found.value == "flash_attention.engines.sglang:register"
