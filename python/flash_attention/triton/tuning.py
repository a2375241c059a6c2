"""The tile sizes to try, and the memory of the best ones.

The fastest is kept per (head_dim, causal, length class, dtype). The length class is only short or long, so that a new
length needs no new search. A configuration that does not fit the GPU's shared memory drops out of the search.
"""

import math
import os

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))

search = True  # False: no timing; the first tile of a table where it fits, else the last
OPTIONS = {"enable_fp_fusion": True}  # S * scale - max in one instruction

# (BLOCK_Q, BLOCK_KV, num_warps, num_stages) by padded head_dim. The first is expected to be the fastest on Hopper; the
# last fits into 64 KiB of shared memory, so that one always runs.
FORWARD = {
    64: [(128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2)],
    128: [(128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2)],
    256: [(128, 64, 8, 2), (64, 64, 4, 2), (32, 32, 4, 1)],
}
GRAD_Q = {
    64: [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3), (64, 32, 4, 2)],
    128: [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (32, 32, 4, 2)],
    256: [(64, 64, 8, 2), (64, 32, 4, 2), (16, 16, 4, 1)],
}
GRAD_KV = {
    64: [(64, 128, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2), (32, 64, 4, 2)],
    128: [(64, 128, 8, 2), (32, 128, 8, 3), (64, 128, 8, 3), (32, 32, 4, 2)],
    256: [(32, 64, 8, 2), (64, 64, 8, 2), (16, 16, 4, 1)],
}


def block_d(head_dim):
    """head_dim padded to a size that tl.dot supports; the padding is masked."""
    return max(16, triton.next_power_of_2(head_dim))


def even(seq_kv):
    """Whether every tile of keys is complete, for every size of tile."""
    return seq_kv % 128 == 0


def length_class(seq_q, seq_kv):
    return int(min(seq_q, seq_kv) > 1024)


def tiles_for(table, head_dim):
    return table[min(max(block_d(head_dim), 64), 256)]


def shared_memory_bytes():
    """Shared memory that one program may use on this GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin


def time_briefly(call, quantiles):
    """Measures with few samples: tiles differ by more than their noise."""
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


def autotuned(table):
    """Decorator: search the tiles of `table` that suit the head_dim of the call."""

    def config(tile):
        return triton.Config({"BLOCK_Q": tile[0], "BLOCK_KV": tile[1]}, num_warps=tile[2], num_stages=tile[3])

    # The interpreter cannot measure time. Any tile is correct there, and a small one exercises every loop.
    if os.environ.get("TRITON_INTERPRET") == "1":
        return triton.autotune([config((32, 32, 4, 1))], key=[])

    def suited(configs, arguments, **constants):
        head_dim = constants.get("HEAD_DIM", arguments.get("HEAD_DIM"))
        wanted = tiles_for(table, head_dim)
        if not search:
            wanted = wanted[:1] if shared_memory_bytes() > 200_000 else wanted[-1:]
        return [c for c in configs if (c.kwargs["BLOCK_Q"], c.kwargs["BLOCK_KV"], c.num_warps, c.num_stages) in wanted]

    every = sorted({tile for tiles in table.values() for tile in tiles})
    return triton.autotune(
        [config(tile) for tile in every],
        key=["HEAD_DIM", "CAUSAL", "length_class"],
        prune_configs_by={"early_config_prune": suited},
        do_bench=time_briefly,
    )
