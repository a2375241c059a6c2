#pragma once

namespace flash_attention::emulator {

/// D[rows x n] += A[rows x 32] B[32 x n], n <= 256: an approximation of the tensor core with 8-bit elements. The products
/// and D are aligned to the largest of them; 13 bits below its leading one are kept of each, and the rest is truncated.
/// This follows published measurements. The order and the last bit of a real sum are not known.
void add_cut_products(float* D, const float* A, const float* B, int rows, int n);

}  // namespace flash_attention::emulator
