"""The classes of the engines' own packages, out of their wheels.

`make test ALL=1` downloads the wheels, without their dependencies, into build/engines; `make test` takes them if they are
there. Their modules import what is made for GPUs and much that no test needs, so single definitions are taken out of the
wheel's files and run as they stand there.
"""

import __future__

import ast
import functools
import inspect
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

VERSIONS = {
    "vllm": "0.33.0",
    "sglang": "0.5.23",
    "flashinfer-python": "0.7.2.post1",
    "flash-attn-4": "4.0.0b36",
    "xformers": "0.0.35",
}
_FOLDER = Path(__file__).parents[3] / "build" / "engines"


@functools.cache
def folder_of(name):
    """Where the wheel is, or the test is skipped."""
    folder = _FOLDER / f"{name}-{VERSIONS[name]}"
    if not folder.exists():
        if not os.environ.get("FLASH_ATTENTION_TEST_ALL"):
            pytest.skip(f"{name} {VERSIONS[name]} is not in build/engines; make test ALL=1 downloads it")
        _unpack(name, folder)
    return folder


def _unpack(name, folder):
    download, part = folder.with_suffix(".download"), folder.with_suffix(".part")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(download)]
    subprocess.run([*pip, f"{name}=={VERSIONS[name]}"], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(part, [member for member in archive.namelist() if member.endswith((".py", "METADATA"))])
    shutil.rmtree(download)
    part.rename(folder)


class Wheel:
    """An engine of which only what is taken can be imported, until close()."""

    def __init__(self, name):
        self.name, self.root = name, folder_of(name)
        self._saved = self._loaded()
        for module in self._saved:
            del sys.modules[module]
        self._package(name)

    def close(self):
        for module in self._loaded():
            del sys.modules[module]
        sys.modules.update(self._saved)

    def _loaded(self):
        return {module: found for module, found in sys.modules.items() if module.partition(".")[0] == self.name}

    def _package(self, name):
        """A package without what its __init__ does."""
        if name in sys.modules:
            return
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = []
        owner, _, last = name.rpartition(".")
        if owner:
            self._package(owner)
            setattr(sys.modules[owner], last, package)

    def take(self, module, *wanted, **given):
        """The module with these definitions of its file, or all of them. given: what they mention of modules not taken.

        Its imports of the standard library, of torch and of modules taken before are done.
        """
        name = f"{self.name}.{module}"
        place = self.root / name.replace(".", "/")
        path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        body, found = [], set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom | ast.Import):
                body += self._import(node)
                continue
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = {getattr(node, "name", None)} | {target.id for target in targets if isinstance(target, ast.Name)}
            if not wanted or names & set(wanted):
                body.append(node)
                found |= names
        if missing := set(wanted) - found:
            raise AttributeError(f"{path}: has no {', '.join(sorted(missing))}")
        self._package(name)
        made = sys.modules[name]
        vars(made).update(given)
        flags = __future__.annotations.compiler_flag
        exec(compile(ast.Module(body, []), str(path), "exec", flags=flags, dont_inherit=True), vars(made))
        return made

    def _import(self, node):
        """What of an import is done."""
        if getattr(node, "level", 0):
            return []
        top = (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
        if top in {"torch", "numpy", *sys.stdlib_module_names} - {"__future__"}:
            return [node]
        if isinstance(node, ast.Import) or top != self.name:
            return []
        node.names = [alias for alias in node.names if hasattr(sys.modules.get(node.module), alias.name)]
        return [node] if node.names else []


def parameters_of(node):
    """[(name, default or None)] of a function's definition."""
    places = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(places) - len(node.args.defaults)) + node.args.defaults
    pairs = [*zip(places, defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return [(place.arg, None if default is None else ast.unparse(default)) for place, default in pairs]


def check_arguments(name, ours, theirs):
    """Theirs in their order, and only then more of ours, all with defaults."""
    parameters = [p for p in inspect.signature(inspect.unwrap(ours)).parameters.values() if p.kind not in (2, 4)]
    assert [p.name for p in parameters][: len(theirs)] == [of for of, _ in theirs], name
    for parameter, (_, default) in zip(parameters, theirs, strict=False):
        has = None if parameter.default is inspect.Parameter.empty else repr(parameter.default).replace("torch.", "")
        if parameter.annotation is not bool or default not in ("1", "0"):
            wanted = None if default is None else default.replace("torch.", "").replace('"', "'")
            assert has == wanted, f"{name}: {parameter.name}"
    assert all(p.default is not inspect.Parameter.empty for p in parameters[len(theirs) :]), name
