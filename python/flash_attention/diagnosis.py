"""Devices and kernels, the kernel of a call and why, compilation before a call, and checks of the installation."""

from __future__ import annotations

from flash_attention import _core, functional, installation
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.options import binding_arguments

TYPE_CHECKING = False  # typing costs more to import than the rest of the package
if TYPE_CHECKING:
    from typing import Any


def version() -> str:
    """The version of the library, e.g. "0.2.0".

    For example:

        print(version())
    """
    return _core.version


def devices() -> list[dict[str, Any]]:
    """Facts about every device this process can use: the CPU first, then the GPUs.

    For example:

        for device in devices():
            print(device["name"])
    """
    return _core.devices()


def kernels() -> list[dict[str, Any]]:
    """Every kernel: name, pass, device and requirements. A name can be given as attention(..., kernel=name).

    For example:

        names = [kernel["name"] for kernel in kernels()]
    """
    return _core.kernels()


def explain(q: Any, k: Any, v: Any, *, backward: bool = False, **options: Any) -> str:
    """The kernel of attention(q, k, v, **options), and why each faster one was not chosen.

        print(explain(q, k, v, causal=True))

    With cu_seqlens_q among the options it explains attention_packed().
    """
    return _core.explain(*_bind(q, k, v, options), backward)


def compile(q: Any, k: Any, v: Any, *, backward: bool = False, **options: Any) -> None:
    """Compiles and loads the kernels of attention(q, k, v, **options), so that the call never waits for a compiler.

    For example:

        compile(q, k, v, causal=True, backward=True)
    """
    _core.prewarm(*_bind(q, k, v, options), False)
    if backward:
        _core.prewarm(*_bind(q, k, v, options), True)


def doctor() -> list[dict[str, Any]]:
    """Checks this machine: a list of {subject, ok, detail, advice} with what was found and what is missing. Never raises.

    For example:

        for finding in doctor():
            print(finding["subject"], finding["detail"], finding["advice"])
    """
    from importlib import import_module, metadata

    findings = [{"subject": "flash_attention", "ok": True, "detail": version(), "advice": ""}]
    others = installation.other_owners()
    if others:
        detail = f"{', '.join(others)}: other projects with files of this package"
        findings.append({"subject": "installation", "ok": False, "detail": detail, "advice": installation.advice(others)})
    findings += _core.diagnose()
    for package, part, use in (
        ("torch", "flex", "tensors with gradients"),
        ("numpy", "arrays", "arrays"),
        ("jax", "jax", "flash_attention.jax"),
    ):
        ok, detail, advice = True, "", ""
        try:
            detail = metadata.version(package)
            import_module(f"flash_attention.{part}")  # a version that this one does not know may break it
        except metadata.PackageNotFoundError:
            ok, detail, advice = False, "not installed", f"pip install {package} (only needed for {use})"
        except Exception as error:
            ok, detail = False, f"{detail}, with which flash_attention.{part} cannot be imported: {error}"
            advice = f"install a version of {package} that docs/python.md names"
        findings.append({"subject": package, "ok": ok, "detail": detail, "advice": advice})
    return findings


def _bind(q, k, v, options):
    """(tensors, options) of the call that the options describe."""
    import inspect

    function = functional.attention_packed if "cu_seqlens_q" in options else functional.attention
    bound = inspect.signature(function).bind(q, k, v, **options)
    bound.apply_defaults()
    wrong = bound.arguments.pop("wrong")
    if wrong:
        refuse_keywords(function, wrong)
    return binding_arguments(bound.arguments)
