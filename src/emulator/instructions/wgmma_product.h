#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "emulator/machine/warpgroup.h"

namespace flash_attention::emulator {

/// D (+)= A B, with the current contents of shared memory as operands. Returns what is wrong with a descriptor, or
/// nothing.
std::string multiply(const Wgmma& op, const unsigned char* shared, std::size_t shared_bytes);

/// D += A B for rows of 16 and 16 rows of n columns, multiples of 8: the sum of 16 products is rounded once. D's rows are
/// `stride` apart.
void accumulate(float* D, int stride, const float* A, const float* B, int rows, int n);

/// Calls visit(shared offset) for each 16 bytes that the product reads.
void for_each_operand_chunk(const Wgmma& op, const std::function<void(std::size_t)>& visit);

/// The place of register i of thread t in the 64 x n accumulator.
constexpr int accumulator_row(int t, int i) { return 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2); }
constexpr int accumulator_column(int t, int i) { return 8 * (i / 4) + 2 * (t % 4) + i % 2; }

}  // namespace flash_attention::emulator
