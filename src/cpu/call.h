#pragma once

// The interface between the host side and the code of an instruction set: plain data and function pointers, and no
// header with inline functions (see isa/).

#include <cstddef>
#include <cstdint>

#include "launch/call.h"

namespace flash_attention::cpu {

/// One step of a kernel: runs item `item` of `count(call)` independent items. `scratch` is the thread's own memory.
struct Step {
  std::int64_t (*count)(const Call& call);
  void (*run)(const Call& call, std::int64_t item, void* scratch);
};

/// The kernels of an instruction set: the steps of each, in order. A null count ends a list.
struct KernelTable {
  Step prefill[5];
  Step decode[3];
  Step backward[11];
  Step backward_decode[5];
  Step standard_forward[4];
  Step standard_backward[7];
  Step tangent[3];
  Step second[7];
  Step listed[2];
  Step listed_backward[4];
  Step ladder_simd[2];
  Step ladder_threads[2];
  ProgramRunner program;  // in tables that have all kernels
  std::size_t scratch_bytes;
  int block_q;  // query rows of a block

  void (*exp2)(const float* from, float* to, std::int64_t count);  // for tests; count a multiple of 16
  void (*tanh)(const float* from, float* to, std::int64_t count);
  double (*multiply_add)(std::int64_t rounds);         // keeps the multiply-add units busy; returns the FLOPs done
  void (*read)(const void* from, std::int64_t bytes);  // loads each byte once; bytes a multiple of 4096
};

}  // namespace flash_attention::cpu
