"""Shared by the kernels: loading a tile, and the keys that a tile of queries sees."""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc):
    """acc + a @ b. The interpreter holds bf16 as integers and would multiply the integers, so it gets fp32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


# fmt: off
@triton.jit
def load_tile(base, first_row, row_stride, num_rows, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              CHECK_ROWS: tl.constexpr):
    """[ROWS, BLOCK_D] of a matrix whose rows are row_stride apart; zero outside the matrix.

    The tile's first row is addressed in 64 bits, so tensors above 2^31 elements work.
    """
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(first_row, tl.int64) * row_stride + rows[:, None] * row_stride + dims[None, :]
    if CHECK_ROWS:
        inside = (first_row + rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_row(base, row, row_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_D] in fp32, zero beyond HEAD_DIM."""
    dims = tl.arange(0, BLOCK_D)
    return tl.load(base + tl.cast(row, tl.int64) * row_stride + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)


@triton.jit
def all_finite(tile):
    return tl.min(tl.min((tile - tile == 0.0).to(tl.int32), 1), 0) == 1


@triton.jit
def store_tile(base, first_row, row_stride, num_rows, tile, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
               BLOCK_D: tl.constexpr):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(first_row, tl.int64) * row_stride + rows[:, None] * row_stride + dims[None, :]
    inside = (first_row + rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def my_tile(length, BLOCK: tl.constexpr):
    """(tile, batch * heads + head) of this program.

    The grid has one axis: the other axes end at 65535, and the tiles of a head should run at the same time, since they
    share its keys in L2.
    """
    tiles = tl.cdiv(length, BLOCK)
    return tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)


@triton.jit
def key_range(first_q, seq_q, seq_kv, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr,
              EVEN_KV: tl.constexpr):
    """(full, end): keys [0, full) are seen by every query of the tile, keys [end, seq_kv) by none; full is a multiple
    of BLOCK_KV. Causal is aligned bottom-right: query i sees key j <= i + seq_kv - seq_q.

    Without a causal mask either all tiles are full or none, so that one loop does the whole work. With a second loop for
    an incomplete last tile, the compiler for sm_90 serialises every tensor-core instruction of the kernel.
    """
    full = seq_kv if EVEN_KV else 0
    end = seq_kv
    if CAUSAL:
        shift = seq_kv - seq_q
        full = tl.maximum(tl.minimum(seq_kv, first_q + 1 + shift), 0) // BLOCK_KV * BLOCK_KV
        end = tl.maximum(tl.minimum(seq_kv, first_q + BLOCK_Q + shift), 0)
    return full, end


@triton.jit
def visible(q_idx, kv_idx, seq_q, seq_kv, CAUSAL: tl.constexpr):
    """Whether query q_idx sees key kv_idx, element-wise."""
    sees = kv_idx < seq_kv
    if CAUSAL:
        sees = sees & (kv_idx <= q_idx + seq_kv - seq_q)
    return sees
