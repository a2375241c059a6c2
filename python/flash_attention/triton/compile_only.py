"""Compiles every kernel for a GPU that need not be present: python -m flash_attention.triton.compile_only hip:gfx942

Prints shared memory, registers and spills of each kernel, if the compiler of the target reports them.
"""

import os
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from . import backward, forward
from .tuning import FORWARD, GRAD_KV, GRAD_Q, OPTIONS, block_d, tiles_for

TARGETS = {"cuda:80": ("cuda", 80, 32), "cuda:90": ("cuda", 90, 32), "hip:gfx942": ("hip", "gfx942", 64)}
TUNED = ((forward.forward_kernel, FORWARD), (backward.grad_q_kernel, GRAD_Q), (backward.grad_kv_kernel, GRAD_KV))
MATRICES = {"Q", "K", "V", "O", "dO", "dQ", "dK", "dV"}
ROW_VECTORS = {"LSE", "D", "dLSE"}


def signature_of(kernel, constants, dtype):
    """Triton's argument types; every stride and matrix pointer is a multiple of 16, as in a real call."""
    types, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name in MATRICES or name in ROW_VECTORS:
            types[name] = f"*{dtype}" if name in MATRICES else "*fp32"
        else:
            types[name] = "fp32" if name.startswith("scale") else "i32"
        if name in MATRICES:
            attributes[(index,)] = [["tt.divisibility", 16]]
        if name.endswith("_strides"):
            types[name] = ("i32",) * 3
            attributes |= {(index, axis): [["tt.divisibility", 16]] for axis in range(3)}
    return types, attributes


def compile_kernel(kernel, constants, target, dtype="bf16", **options):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types, attributes = signature_of(kernel, constants, dtype)
    source = ASTSource(kernel, types, constants, attributes)
    return compile(source, target=GPUTarget(*TARGETS[target]), options={**options, **OPTIONS})


def compile_tuned(target, head_dim, tiles):
    """Yields (name, compiled kernel) of the tuned kernels; `tiles` is a slice of their tables."""
    for tuned, table in TUNED:
        for block_q, block_kv, warps, stages in tiles_for(table, head_dim)[tiles]:
            for causal in (False, True):
                constants = {"HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "CAUSAL": causal, "EVEN_KV": True,
                             "BLOCK_Q": block_q, "BLOCK_KV": block_kv}  # fmt: skip
                name = f"{tuned.fn.__name__} d{head_dim} {block_q}x{block_kv} {'causal' if causal else 'full'}"
                yield name, compile_kernel(tuned.fn, constants, target, num_warps=warps, num_stages=stages)


def compile_preprocess(target, head_dim):
    constants = {"HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "BLOCK_Q": 64, "HAS_DLSE": True}
    return f"preprocess_kernel d{head_dim}", compile_kernel(backward.preprocess_kernel, constants, target)


def main(target="hip:gfx942", *flags):
    """Flags: --smallest, only the last tile of each table; --all, every tile; otherwise the first."""
    if target not in TARGETS:
        sys.exit(f"target: got '{target}'; allowed: {', '.join(TARGETS)}")
    if os.environ.get("TRITON_INTERPRET") == "1":  # the kernels are already bound to the interpreter: start again
        command = [sys.executable, "-m", "flash_attention.triton.compile_only", target, *flags]
        os.execve(sys.executable, command, {**os.environ, "TRITON_INTERPRET": "0"})
    tiles = slice(None) if "--all" in flags else slice(-1, None) if "--smallest" in flags else slice(1)
    head_dims = [int(flag) for flag in flags if flag.isdigit()] or [64, 128, 256]
    for head_dim in head_dims:
        for name, kernel in (compile_preprocess(target, head_dim), *compile_tuned(target, head_dim, tiles)):
            print(f"{target} {name} shared {kernel.metadata.shared} code {len(kernel.kernel)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
