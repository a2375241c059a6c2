"""vLLM's backend, driven as vLLM drives it: with the metadata, caches and layouts of the real package."""

import importlib
import importlib.metadata
import logging
import sys

import engine_wheels
import pytest
import torch
from serving_steps import DIM, HEADS, KV_HEADS, OPTIONS, PAGE, STEPS, batch_of, expected_of, name_of, sequences

LAYERS, BLOCKS = 2, 10
BACKEND = (
    "AttentionType", "MultipleOf", "AttentionBackend", "AttentionMetadata", "T", "M", "CommonAttentionMetadata",
    "AttentionCGSupport", "AttentionMetadataBuilder", "AttentionImplBase", "AttentionImpl",
)  # fmt: skip
REGISTRY = (
    "_AttentionBackendEnumMeta", "AttentionBackendEnum", "MambaAttentionBackendEnum", "_ATTN_OVERRIDES",
    "_MAMBA_ATTN_OVERRIDES", "register_backend",
)  # fmt: skip


@pytest.fixture(scope="module")
def plugin():
    """The plug-in, loaded over what it and a test need of vLLM."""
    wheel = engine_wheels.Wheel("vllm")
    quiet = {"logger": logging.getLogger("vllm")}
    wheel.take("envs")
    wheel.take("config.vllm", "_current_vllm_config", "get_current_vllm_config_or_none")
    sys.modules["vllm.config"].get_current_vllm_config_or_none = sys.modules[
        "vllm.config.vllm"
    ].get_current_vllm_config_or_none
    groups = "_DCP", "_PCP", "get_dcp_world_size_and_rank", "get_pcp_group"
    wheel.take("distributed.parallel_state", *groups, GroupCoordinator=None)
    wheel.take("utils.math_utils", "cdiv", "round_up")
    wheel.take("utils.torch_utils", "get_dtype_size")
    wheel.take("v1.kv_cache_layout")
    specs = "KVCacheSpec", "AttentionSpec", "FullAttentionSpec", "KVQuantMode", "get_kv_quant_mode"
    wheel.take("v1.kv_cache_interface", *specs, "compute_layer_kv_cache_shape_bytes", "compute_layout_strides")
    sys.modules["vllm.v1.kv_cache_interface"].KVCacheLayout = sys.modules["vllm.v1.kv_cache_layout"].KVCacheLayout
    wheel.take("v1.attention.backend", *BACKEND)
    wheel.take("utils.import_utils", "resolve_obj_by_qualname")
    wheel.take("v1.attention.backends.registry", *REGISTRY, **quiet)
    wheel.take("model_executor.layers.attention.attention", "set_default_quant_scales", nn=torch.nn)
    wheel.take("platforms.interface", "DeviceCapability")
    loader = wheel.take("plugins", "DEFAULT_PLUGINS_GROUP", "load_plugins_by_group", **quiet)
    loader.envs = sys.modules["vllm.envs"]
    sys.modules.pop("flash_attention.engines.vllm", None)
    yield importlib.import_module("flash_attention.engines.vllm")
    wheel.close()


def cache_of(layout, dtype=torch.float32, dim=DIM):
    """The second of two layers, in vLLM's layout; no key is there yet. 8 bits are bytes, as vLLM has them."""
    from vllm.v1 import kv_cache_interface as kv
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = kv.FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=dim, dtype=dtype)
    shape = (LAYERS, *kv.compute_layer_kv_cache_shape_bytes(spec, BLOCKS))
    strides = kv.compute_layout_strides(spec, BLOCKS, LAYERS, KVCacheLayout[layout])
    raw = torch.full((torch.Size(shape).numel(),), -1, dtype=torch.int8)  # NaN in every type
    return raw.as_strided(shape, strides)[1].view(dtype)


class Layer(torch.nn.Module):
    """What a backend sees of a layer: the scales that vLLM gives each of its own."""

    def __init__(self, k_scale=1.0, v_scale=1.0):
        super().__init__()
        from vllm.model_executor.layers.attention.attention import set_default_quant_scales

        set_default_quant_scales(self, register_buffer=True)
        self._k_scale.fill_(k_scale)
        self._v_scale.fill_(v_scale)


def run(plugin, step, everything, cache, impl, layer=None, before_comparison=lambda: None, **options):
    """One step, checked against fp64."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts, (q, k, v), slots, lengths = batch_of(everything, STEPS[step])
    table = torch.full((3, 3), -1, dtype=torch.int32)
    for i, s in enumerate(everything):
        table[i, : len(s.pages)] = torch.tensor(s.pages)
    tokens, padding = len(q), 2
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=3,
        num_actual_tokens=tokens,
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=torch.cat([slots, torch.full((padding,), -1)]),
    )
    builder = plugin.Backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
    padded = [torch.cat([x, torch.full_like(x[:1], torch.nan).repeat(padding, 1, 1)]) for x in (q, k, v)]
    output = torch.full((tokens + padding, HEADS, q.shape[-1]), 7.0, dtype=q.dtype)
    impl.forward(layer, *padded, cache, metadata, output)
    assert (output[tokens:] == 7).all()
    before_comparison()
    torch.testing.assert_close(
        output[:tokens].double(), expected_of(everything, STEPS[step], **options), atol=1e-5, rtol=1e-4
    )


def impl_of(plugin, options, dim=DIM, **more):
    slopes = options.get("slopes")
    return plugin.Backend.get_impl_cls()(
        HEADS, dim, dim**-0.5, KV_HEADS, None if slopes is None else slopes.tolist(), options.get("window"),
        logits_soft_cap=options.get("softcap"), sinks=options.get("sink"), **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "layout, options",
    [*(("LBNHC", options) for options in OPTIONS), *((layout, {}) for layout in ("LBHNC", "BLNHC", "BHLNC"))],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_steps(layout, options, plugin):
    impl, everything, cache = impl_of(plugin, options), sequences(), cache_of(layout)
    for step in STEPS:
        run(plugin, step, everything, cache, impl, **options)
    # Nothing is written but keys and values: pages of nobody, and the places behind each sequence, are as they were.
    assert cache[[0, 4, 6, 8]].isnan().all() and cache[9, :, 3].isnan().all()
    assert not cache[1].isnan().any()


@pytest.mark.parametrize("codes", ["fp8", "fp8_e5m2"])
def test_caches_of_eight_bits(codes, plugin):
    """Keys are code * scale; the oracle has them rounded."""
    dtype = torch.float8_e5m2 if codes == "fp8_e5m2" else torch.float8_e4m3fn
    assert plugin.Backend.supports_kv_cache_dtype(codes) and plugin.Backend.supports_kv_cache_dtype("fp8_e4m3")
    impl, everything, cache = impl_of(plugin, {}, kv_cache_dtype=codes), sequences(), cache_of("LBNHC", torch.uint8)
    layer, scales = Layer(0.5, 0.25), (0.5, 0.25)

    def round_all():
        for s in everything:
            s.k, s.v = ((x / scale).to(dtype).float() * scale for x, scale in zip((s.k, s.v), scales, strict=True))

    for step in STEPS:
        run(plugin, step, everything, cache, impl, layer, before_comparison=round_all)


def test_the_bits_of_a_row_do_not_depend_on_the_batch(plugin, monkeypatch):
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    assert plugin.Backend.supports_batch_invariance()
    impl = impl_of(plugin, {})
    assert impl.invariant
    run(plugin, "prefill", sequences(), cache_of("LBNHC"), impl)


@pytest.mark.parametrize("window", [None, 3])
def test_queries_that_see_both_ways(window, plugin):
    """A window is symmetric there."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    q, k, v = (torch.randn(7, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts, lengths = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    common = CommonAttentionMetadata(
        starts, starts, lengths, 1, 7, 7, 7, torch.tensor([[3, 1]], dtype=torch.int32),
        torch.tensor([12, 13, 14, 15, 4, 5, 6]), False,
    )  # fmt: skip
    metadata = plugin.Builder(None, [], None, torch.device("cpu")).build(0, common)
    out = torch.empty(7, HEADS, DIM)
    impl_of(plugin, {"window": window}).forward(None, q, k, v, cache_of("LBHNC"), metadata, out)
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
    if window is not None:
        places = torch.arange(7)
        s = s.masked_fill((places[:, None] - places).abs() >= window, -torch.inf)
    torch.testing.assert_close(out.double(), torch.einsum("hqk,khd->qhd", s.softmax(-1), v), atol=1e-5, rtol=1e-4)


def test_layers_that_share_a_cache_write_nothing(plugin):
    """The later layer reads what the earlier one has written."""
    everything, cache = sequences(), cache_of("LBNHC")
    run(plugin, "prefill", everything, cache, impl_of(plugin, {}))
    before = cache.clone()
    impl = impl_of(plugin, {}, kv_sharing_target_layer_name="layers.0")
    others = sequences()  # with keys of their own, which are passed and must not be read

    def expect_the_first_keys():
        for s, first in zip(others, everything, strict=True):
            s.k, s.v = first.k, first.v

    run(plugin, "prefill", others, cache, impl, before_comparison=expect_the_first_keys)
    assert torch.equal(cache.view(torch.int32), before.view(torch.int32))


def test_what_vllm_asks_before_it_chooses(plugin):
    """validate_configuration() is vLLM's own."""
    from vllm.platforms.interface import DeviceCapability

    def reasons(**changes):
        asked = {
            "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
            "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
            "device_capability": DeviceCapability(9, 0), "attn_type": "decoder", "has_sliding_window": True,
            "use_non_causal": True, "use_batch_invariant": True,
        }  # fmt: skip
        return plugin.Backend.validate_configuration(**{**asked, **changes})

    assert reasons() == [] and reasons(kv_cache_dtype="fp8_e5m2", head_size=512, block_size=7) == []
    assert reasons(use_mla=True) == ["MLA not supported"]
    assert reasons(kv_cache_dtype="nvfp4") == ["kv_cache_dtype not supported"]
    assert reasons(head_size=584) == ["head_size not supported"]
    assert reasons(attn_type="encoder_only") == ["attention type encoder_only not supported"]
    assert reasons(use_rswa=True, use_dcp=True, use_mm_prefix=True) == [
        "partial multimodal token full attention not supported", "R-SWA not supported", "DCP not supported"
    ]  # fmt: skip


def test_refusals(plugin):
    with pytest.raises(NotImplementedError, match=r"attn_type: got .*only decoders"):
        plugin.Impl(HEADS, DIM, 1.0, attn_type="encoder_only")
    with pytest.raises(NotImplementedError, match="kv_cache_dtype: got nvfp4; allowed are auto"):
        plugin.Impl(HEADS, DIM, 1.0, kv_cache_dtype="nvfp4")
    out = torch.ones(2, HEADS * DIM)
    impl = plugin.Impl(HEADS, DIM, 1.0)
    assert (impl.forward(None, out, out, out, None, None, out) == 0).all()  # no metadata: vLLM measures memory
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl.forward(None, out, out, out, None, None, out, output_scale=torch.ones(1))


def test_registration(plugin):
    """The place for others, once; another plug-in's is left alone."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    try:
        plugin.register()
        assert custom.get_class() is plugin.Backend
        register_backend(custom, "another.Backend")
        plugin.register()
        assert custom.get_path() == "another.Backend"
    finally:
        custom.clear_override()


def test_vllm_finds_and_runs_it(plugin, caplog):
    """By vLLM's own loader of plug-ins."""
    import vllm.plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    (found,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if "flash_attention" in e.value]
    with caplog.at_level(logging.ERROR):
        vllm.plugins.load_plugins_by_group("vllm.general_plugins")[found.name]()
    assert AttentionBackendEnum.CUSTOM.get_class() is plugin.Backend and not caplog.records
    AttentionBackendEnum.CUSTOM.clear_override()
