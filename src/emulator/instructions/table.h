#pragma once

#include "emulator/runtime/interface.h"

namespace flash_attention::emulator {

/// The library's side of the instructions. Each unit gets it when it is loaded.
const Table& runtime_table();

// barriers.cpp
void barrier(int id, int threads, bool wait);  // __syncthreads, bar.sync, bar.arrive
void cluster_barrier(bool wait);               // barrier.cluster.arrive, barrier.cluster.wait
void set_registers(int count, bool increase);  // setmaxnreg

// bulk.cpp, the bulk engine: TMA boxes and runs of bytes.
void bulk_load(const BulkOperand& operand);
void bulk_store(const BulkOperand& operand);
void bulk_commit();
void bulk_wait(int pending, bool read);
void fence_proxy_async();

// wgmma.cpp, asynchronous warpgroup products. A thread only delivers its part and goes on. It meets the others in
// wgmma_wait.
void wgmma(const WgmmaOperand& operand);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

// tensor_product.cpp, asynchronous products of tensor memory; tensor_memory.h has what warps do with it.
void tensor_product(const TensorProductOperand& operand);
void tensor_commit(unsigned barrier);  // an arrival when the thread's products are done
void tensor_fence(bool after);         // before or after threads meet

}  // namespace flash_attention::emulator
