"""The C interface by ctypes, for devices that the Python package does not offer: structs are those of the header."""

import ctypes
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TYPES = {
    "size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64, "float": ctypes.c_float,
}  # fmt: skip


def _structs(header):
    text, made = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL), dict(_TYPES)
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.DOTALL):
        fields = []
        for line in body.split(";")[:-1]:
            of, names = re.match(r"\s*(?:const )?(\w+)(.*)", line, re.DOTALL).groups()
            for part in names.split(","):
                name_of_field, sizes = re.search(r"(\w+)((?:\[\d+\])*)\s*$", part).groups()
                kind = ctypes.c_char_p if of == "char" else ctypes.c_void_p if "*" in part else made[of]
                for size in reversed(re.findall(r"\d+", sizes)):
                    kind *= int(size)
                fields.append((name_of_field, kind))
        made[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return made


class Emulator:
    """Forward and backward of one problem on emulated sm_90. Tensors of torch on the CPU, dense."""

    def __init__(self, library):
        self._library = ctypes.CDLL(str(library))
        self._structs = _structs((ROOT / "include/flash_attention/c_api.h").read_text())
        self._library.flash_attention_last_error.restype = ctypes.c_char_p

    def made(self, kind, **fields):
        struct = self._structs[f"flash_attention_{kind}"]()
        getattr(self._library, f"flash_attention_{kind}_init_sized")(
            ctypes.byref(struct), ctypes.c_size_t(ctypes.sizeof(struct))
        )
        for name, value in fields.items():
            setattr(struct, name, value.data_ptr() if hasattr(value, "data_ptr") else value)
        return struct

    def run(self, what, problem, buffers, kernel):
        import torch

        options = self.made("options", device_kind=2, emulated_arch=90, kernel=kernel.encode())
        size = ctypes.c_size_t()
        self._check(self._library.flash_attention_workspace_bytes(
            ctypes.byref(problem), int(what == "backward"), ctypes.byref(options), ctypes.byref(size)
        ))  # fmt: skip
        workspace = torch.empty(size.value + 256, dtype=torch.uint8)
        options.workspace, options.workspace_bytes = -(-workspace.data_ptr() // 256) * 256, size.value
        function = getattr(self._library, f"flash_attention_{what}")
        self._check(function(*(ctypes.byref(struct) for struct in (problem, buffers, options))))

    def _check(self, status):
        if status != 0:
            raise RuntimeError(self._library.flash_attention_last_error().decode())
