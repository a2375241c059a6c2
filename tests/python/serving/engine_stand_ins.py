"""Just enough of vLLM (v1/attention at commit 0014ca6b) and SGLang (srt/layers/attention at 009db01a) to load the plug-ins.

Abstract methods, constructor arguments and fields have the names that those commits have; nothing here computes.
"""

import abc
import enum
import sys
import types
import typing


def _install(monkeypatch, name, **members):
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules or not isinstance(sys.modules[path], types.ModuleType):
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    vars(sys.modules[name]).update(members)


def install_vllm(monkeypatch):
    """Returns the overrides that register_backend has made."""
    overrides = {}

    class AttentionBackend(abc.ABC):
        @staticmethod
        @abc.abstractmethod
        def get_name(): ...

        @staticmethod
        @abc.abstractmethod
        def get_impl_cls(): ...

        @staticmethod
        @abc.abstractmethod
        def get_builder_cls(): ...

        @staticmethod
        @abc.abstractmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ...

        @classmethod
        def supports_dtype(cls, dtype):
            return dtype in cls.supported_dtypes

    M = typing.TypeVar("M")

    class AttentionMetadataBuilder(abc.ABC, typing.Generic[M]):
        @abc.abstractmethod
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            self.device = device

        @abc.abstractmethod
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    class AttentionImpl(abc.ABC, typing.Generic[M]):
        @abc.abstractmethod
        def __init__(self, *arguments): ...

        @abc.abstractmethod
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output): ...

    class AttentionType(str, enum.Enum):
        DECODER = "decoder"
        ENCODER_ONLY = "encoder_only"

    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        CUSTOM = None

        def is_overridden(self):
            return self in overrides

    graphs = enum.Enum("AttentionCGSupport", {"ALWAYS": 3, "UNIFORM_BATCH": 2, "NEVER": 0})
    _install(
        monkeypatch,
        "vllm.v1.attention.backend",
        AttentionBackend=AttentionBackend,
        AttentionCGSupport=graphs,
        AttentionImpl=AttentionImpl,
        AttentionMetadata=type("AttentionMetadata", (), {}),
        AttentionMetadataBuilder=AttentionMetadataBuilder,
        AttentionType=AttentionType,
        MultipleOf=type("MultipleOf", (), {"__init__": lambda self, base: setattr(self, "base", base)}),
    )
    _install(
        monkeypatch,
        "vllm.v1.attention.backends.registry",
        AttentionBackendEnum=AttentionBackendEnum,
        register_backend=lambda backend, class_path=None: overrides.__setitem__(backend, class_path),
    )
    return overrides


def install_sglang(monkeypatch):
    """Returns the backends and the choices of the command line."""
    backends, choices = {}, []

    class AttentionBackend(abc.ABC):
        @abc.abstractmethod
        def init_forward_metadata(self, forward_batch): ...

        def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
            step = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
            return step(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **options)

    def register_attention_backend(name):
        return lambda factory: backends.setdefault(name, factory)

    place = "sglang.srt.layers.attention"
    _install(monkeypatch, f"{place}.base_attn_backend", AttentionBackend=AttentionBackend)
    _install(monkeypatch, f"{place}.attention_registry", register_attention_backend=register_attention_backend)
    _install(monkeypatch, "sglang.srt.server_args", add_attention_backend_choices=choices.extend)
    return backends, choices
