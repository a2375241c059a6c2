"""Functions with the names, layouts and meanings of other libraries. They rename arguments and call this package.

Each module also has a short path: flash_attention.flash_attn is the same module as flash_attention.compat.flash_attn.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

SHORT = ("engines", "flash_attn", "flash_attn_3", "flash_attn_4", "flash_mla", "flashinfer", "xformers")


class _ShortPaths:
    """Finds flash_attention.x.y as flash_attention.compat.x.y."""

    def __init__(self, package):
        self.prefixes = tuple(f"{package}.{name}" for name in SHORT)
        self.cut = len(package)
        self.specs = {}

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.prefixes) and name.split(".")[1] in SHORT:
            return ModuleSpec(name, self)
        return None

    def create_module(self, spec):
        module = import_module(__name__ + spec.name[self.cut :])
        self.specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module):
        """The module is complete; the import system has given it the spec of the short path."""
        module.__spec__ = self.specs.pop(module.__spec__.name)


def install(package):
    """Makes the short paths of `package` lead to these modules."""
    sys.meta_path.insert(0, _ShortPaths(package))
