"""The interface that an engine must have for its plug-in: the parameters that it passes to each method."""

import importlib.metadata
import inspect


def check(engine, expected, works):
    """Refuses a version of `engine` whose methods have other parameters, before anything is registered.

    expected: {method: the names of its parameters}. works: the versions that the plug-in was checked with.
    """
    for method, names in expected.items():
        if isinstance(method, str):
            found = "is missing"
        else:
            found = " ".join(inspect.signature(method).parameters)
            if found == names:
                continue
            method, found = method.__qualname__, f"has the parameters {found}"
        raise ImportError(
            f"flash_attention's plug-in does not fit {engine} {version_of(engine)}: {method} {found}; expected {names}. "
            f"Versions that work: {works}"
        )


def member(owner, name):
    """The method, or its name if there is none."""
    return getattr(owner, name, f"{owner.__qualname__}.{name}")


def version_of(engine):
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
