"""The binding: tensors in, the C++ library's calls out. Use the package's functions instead of these."""

from collections.abc import Callable
from typing import Any

version: str
options: tuple[tuple[str, str, Any], ...]  # (name, kind, default) of flash_attention.options.Options
tensors: tuple[str, ...]  # of flash_attention.options.Tensors
arguments: tuple[str, ...]  # those of attention() after q, k and v, in its order
cache_arguments: tuple[str, ...]  # those of attention_over_cache()
named_options: tuple[str, ...]  # the last of options, which attention() passes on as they are

def forward(
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
    out: Any,
    lse: Any | None,
    seed: int,
    offset: int,
    stream: int,
    allocate: Callable[[int], Any],
    program: tuple[Any, ...] | None = None,
    codes: str = "",
    latent: bool = False,
    backward: int | None = None,
    kept: KeptMasks | None = None,
    row_max: Any | None = None,
    statistics: tuple[Any | None, Any | None, Any | None] | None = None,
) -> None: ...
def backward(
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
    results: tuple[Any, Any],
    gradients: tuple[Any, ...],
    seed: int,
    offset: int,
    stream: int,
    allocate: Callable[[int], Any],
    program: tuple[Any, ...] | None = None,
    kept: KeptMasks | None = None,
    part: str | None = None,
    statistics: tuple[Any | None, Any | None, Any | None] | None = None,
) -> None: ...
def tangent(
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
    out: Any,
    lse: Any | None,
    tangents: tuple[Any, ...],
    seed: int,
    offset: int,
    stream: int,
    allocate: Callable[[int], Any],
) -> None: ...
def second(
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
    results: tuple[Any, Any],
    gradients: tuple[Any, ...],
    tangents: tuple[Any, ...],
    seed: int,
    offset: int,
    stream: int,
    allocate: Callable[[int], Any],
) -> None: ...

class KeptMasks:
    """What GPUs found out about the masks of one mask object. `allocate(bytes, device)` gives a uint8 tensor."""

    made: int
    def __init__(self, allocate: Callable[[int, int], Any]) -> None: ...
    def __len__(self) -> int: ...

def append(tensors: tuple[Any, ...], scalars: tuple[Any, ...], stream: int) -> None: ...
def prepare(tensors: tuple[Any, ...], scalars: tuple[Any, ...], stream: int) -> None: ...
def prepare_backward(
    tensors: tuple[Any, ...],
    scalars: tuple[Any, ...],
    gradients: tuple[Any, ...],
    workspace: Callable[[int], Any],
    stream: int,
) -> None: ...
def attention(q: Any, k: Any, v: Any, *values: Any, **arguments: Any) -> Any: ...
def set_python(general: Callable[..., Any], renamed: Callable[[Exception, dict[str, str]], Exception]) -> None: ...
def program_forward(
    q: Any,
    k: Any,
    v: Any,
    options: tuple[Any, ...],
    program: tuple[Any, ...],
    with_lse: bool,
    backward: int | None,
    kept: KeptMasks | None,
    general: Callable[[], Any],
) -> tuple[Any, Any, tuple[int, int]]: ...
def program_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any | None,
    options: tuple[Any, ...],
    program: tuple[Any, ...],
    kept: KeptMasks | None,
    general: Callable[[], Any],
) -> tuple[Any, Any, Any]: ...
def differentiable_forward(ctx: Any, q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> Any: ...
def attention_backward(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: tuple[Any, ...]
) -> tuple[Any, ...]: ...
def set_eager(
    tensor: type,
    empty_like: Callable[[Any], Any],
    empty_strided: Callable[..., Any],
    float32: Any,
    uint8: Any,
    grad_enabled: Callable[[], bool],
    deterministic: Callable[[], bool],
    matmul_precision: Callable[[], str],
    differentiate: Callable[[Any, Any, Any, tuple[Any, ...]], Any],
    general_backward: Callable[..., tuple[Any, ...]],
    autocast: Callable[[], bool],
    autocast_of_cuda: Callable[[], bool],
    dispatch_modes: Callable[[], int],
    interceptors: tuple[Callable[[], Any], ...],
    forward_ad: dict[str, Any],
    profiler: dict[str, Any],
    options: type,
) -> None: ...
def explain(tensors: tuple[Any, ...], options: tuple[Any, ...], backward: bool) -> str: ...
def prewarm(tensors: tuple[Any, ...], options: tuple[Any, ...], backward: bool) -> None: ...
def fill_dropout_mask(out: Any, seed: int, offset: int, dropout_p: float) -> None: ...
def devices() -> list[dict[str, Any]]: ...
def kernels() -> list[dict[str, Any]]: ...
def diagnose() -> list[dict[str, Any]]: ...
def cache_directory() -> str: ...
def cache_entries() -> list[dict[str, Any]]: ...
def clear_cache() -> int: ...
def tune(
    device: str,
    text: str,
    name: str,
    budget: float,
    again: bool,
    progress: Callable[[int, int, str, float], Any] | None,
) -> list[dict[str, Any]]: ...
def export_tuned(device: str) -> str: ...
def import_tuned(device: str, text: str, name: str) -> int: ...
def invariant_by_default() -> bool: ...
def set_log(callable: Callable[[str], Any]) -> None: ...
