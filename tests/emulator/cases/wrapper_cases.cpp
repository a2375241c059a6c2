#include "emulator/wrapper_cases.h"

#include "emulator/cases/arithmetic.h"
#include "emulator/cases/bulk.h"
#include "emulator/cases/matrix.h"
#include "emulator/cases/memory.h"
#include "emulator/cases/pairs.h"
#include "emulator/cases/tensor_memory.h"
#include "emulator/cases/warp.h"
#include "emulator/cases/warpgroup.h"
#include "emulator/cases/warpgroup_fp8.h"

namespace flash_attention::testing {

const WrapperCases& wrapper_cases() {
  static const WrapperCases cases = [] {
    WrapperCases all;
    for (const auto family :
         {warp_cases, block_cases, memory_cases, copy_async_cases, convert_cases, pair_cases, math_cases, ldmatrix_cases,
          movmatrix_cases, stmatrix_cases, mma_cases, mbarrier_cases, bulk_cases, tma_cases, wgmma_cases, wgmma_fp8_cases,
          cluster_cases, tensor_memory_cases, float_pair_cases}) {
      for (WrapperCase& c : family()) all.push_back(std::move(c));
    }
    return all;
  }();
  return cases;
}

}  // namespace flash_attention::testing
