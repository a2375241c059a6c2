"""Measures how fast all SMs of a GPU read from L2; `flash-attention trace` has the figure of an H200. Needs torch and triton.

bench/l2_reads.py

Four programs an SM read 16 MiB again and again, 16 KiB at a time, past L1. Prints TB/s: bytes read in the median of nine runs.
"""

import torch
import triton
import triton.language as tl

FLOATS, CHUNK, ROUNDS, PER_SM = 4 << 20, 4096, 1024, 4


@triton.jit
def read(x, out, floats: tl.constexpr, rounds: tl.constexpr, chunk: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros([chunk], tl.float32)
    for r in range(rounds):
        begin = ((program * 37 + r * 53) % (floats // chunk)) * chunk
        total += tl.load(x + begin + tl.arange(0, chunk), cache_modifier=".cg")
    tl.store(out + program * chunk + tl.arange(0, chunk), total)


def main() -> None:
    programs = PER_SM * torch.cuda.get_device_properties(0).multi_processor_count
    x, out = torch.randn(FLOATS, device="cuda"), torch.empty(programs * CHUNK, device="cuda")
    times = []
    for _ in range(12):  # the first three warm up
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        read[(programs,)](x, out, FLOATS, ROUNDS, CHUNK, num_warps=8)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    print(f"{programs * ROUNDS * CHUNK * 4 / sorted(times[3:])[4] / 1e9:.2f} TB/s from L2")


if __name__ == "__main__":
    main()
