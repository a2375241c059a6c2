"""The names, the order and the defaults of FlashInfer's arguments, as its own wheel has them."""

import ast
import functools
import inspect

import pytest
from engine_wheels import check_arguments, folder_of, parameters_of

flashinfer = pytest.importorskip("flash_attention.flashinfer")

FILES = (
    "attention/_core",
    "cascade",
    "decode",
    "mla/_batch_mla/_wrapper",
    "page",
    "pod",
    "prefill",
    "sparse",
    "msa_ops/sparse_prefill",
    "msa_ops/sparse_decode",
)
# Of plan() of decoding the wheel has (*deprecated_positional_args, **kwargs), as we do; its names are in _plan_impl.
BY_OTHER_NAMES = {"BatchDecodeWithPagedKVCacheWrapper.plan"}
# Whatever the arguments, the answer is the same.
ANY_ARGUMENTS = {f"Batch{kind}WithPagedKVCacheWrapper.workspace_size" for kind in ("Decode", "Prefill")}
# The form with flat tables, which the wheel takes beside its newer ones: the arguments by position are the same.
FLAT_FORM = {f"BatchMLAPagedAttentionWrapper.{method}" for method in ("plan", "run")}
# Hidden: what looks into FlashInfer's own kernels, and names that begin with an underscore.
NOT_OFFERED = {"BatchDecodeWithPagedKVCacheWrapper.resolved_backend"}


@functools.cache
def definitions():
    """{name: function or class} of the wheel, of overloaded functions the last."""
    folder = folder_of("flashinfer-python") / "flashinfer"
    found = {}
    for file in FILES:
        for node in ast.parse((folder / f"{file}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, node)
    return found


@pytest.mark.parametrize("name", flashinfer.__all__)
def test_arguments_are_those_of_the_wheel(name):
    ours, theirs = getattr(flashinfer, name), definitions()[name]
    if isinstance(theirs, ast.Assign):  # made of a function that is compared itself
        assert isinstance(ours, functools.partial)
        return
    if isinstance(theirs, ast.FunctionDef):
        check_arguments(name, ours, parameters_of(theirs))
        return
    methods = {}
    for node in theirs.body:
        if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
            methods[node.name] = node
    for method, node in methods.items():
        full = f"{name}.{method}"
        if full in BY_OTHER_NAMES | ANY_ARGUMENTS | NOT_OFFERED:
            continue
        found = inspect.getattr_static(ours, method)
        if isinstance(found, property):
            continue
        if isinstance(found, functools.partialmethod):
            found = found.func
        if full in FLAT_FORM:
            named = [p.name for p in inspect.signature(found).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
            assert named == [place.arg for place in node.args.args]
            continue
        check_arguments(full, found, parameters_of(node))


def test_the_options_of_a_decode_plan_are_those_of_the_wheel():
    from flash_attention.compat.flashinfer import decode

    wrapper = definitions()["BatchDecodeWithPagedKVCacheWrapper"]
    (theirs,) = (node for node in wrapper.body if getattr(node, "name", None) == "_plan_impl")
    known = dict(parameters_of(theirs)[8:])
    assert set(known) == set(decode._PLAN_OPTIONS)
    for name, default in known.items():
        assert repr(decode._PLAN_OPTIONS[name]) == default.replace('"', "'"), name
