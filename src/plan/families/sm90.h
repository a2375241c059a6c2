#pragma once

#include <string>

#include "abi/config.h"
#include "plan/kernel_table.h"

// Shared by forward/sm90, backward/sm90, decode/sm90 and the ladder's rungs for Hopper.

namespace flash_attention::plan {

/// Why TMA cannot address a tensor that the pass copies; empty if it can address all.
std::string reject_tma_strides(const Problem& problem, Pass pass);

/// The same for only K and V, in pages or not.
std::string reject_tma_cache(const Problem& problem);

/// Whether K and V have no rows at all. Then no tensor map can describe them.
bool has_no_key_rows(const Problem& problem);

/// Why no kernel for Hopper can take the problem; empty if one might.
std::string reject_sm90(const Problem& problem, const DeviceInfo& device);

/// Whether forward/sm80 in tiles of 32 x 64 is faster than forward/sm90: for few short rows, which are done before
/// warps with roles and tensor maps have begun.
bool is_short_for_sm90(const Request& request);

/// Keys of a TMA box out of pages: the largest number that divides the page and the block of keys.
int rows_of_page_box(const Problem& problem, int block_kv);

/// Whether TMA loads the bias of forward/sm90, if its address is aligned.
bool has_bias_boxes(const Request& request);
/// The same for backward/sm90: heads of up to 64 columns leave room for boxes.
bool has_backward_bias_boxes(const Request& request);

/// If many heads and sequences share their masks, and the words of these are few, the launch that makes the map of
/// tiles also makes the words, once for all. Returns the configuration of the kernel that reads them, which has no mask
/// itself, and is the same for all masks. Otherwise returns `config`.
abi::MaskWords choose_mask_words(const abi::ForwardConfig& config);
bool has_precomputed_mask_bits(const Problem& p, const abi::ForwardConfig& config);
abi::ForwardConfig with_precomputed_mask_bits(const Problem& problem, const abi::ForwardConfig& config, Plan& plan);
/// The same for backward/sm90: a launch after that of the map makes words of the tiles that the map shows in part
/// (kernels/mask/mask_bits.cuh).
bool has_mask_bits(const Problem& problem, const abi::BackwardConfig& config);
std::int64_t step_word_bytes(const Problem& problem);

/// The tensor maps of forward/sm90 and of similar rungs: kernels/abi/tensor_maps.h.
std::vector<MapLayout> forward_sm90_maps(const Problem& problem, int block_q, int block_kv, bool bias_boxes = false);
/// The tensor maps of forward/sm90_fp8. V^T is in the workspace.
std::vector<MapLayout> forward_sm90_fp8_maps(const Problem& problem, const Plan& plan);

/// The loop of forward/sm90, for a configuration that is complete except for the loop.
abi::ForwardLoop choose_loop(const abi::ForwardConfig& config);
abi::KeyOrder choose_key_order(const abi::ForwardConfig& config);

/// The padded layout of row statistics and dQ sums: padded_rows in kernels/backward/sm90/parts/shape.cuh.
constexpr std::int64_t sm90_padded_rows(std::int64_t total_q, std::int64_t batch) {
  return (total_q + 68 * batch + 3) / 4 * 4;
}

struct BackwardSm90Structure;  // backward_sm90/structure.h

/// Plans backward/sm90. If there are few key heads, the heads of a group may be split between tasks.
Plan lay_out_sm90_backward(const Request& request, bool whole, const BackwardSm90Structure& structure);

/// Plans a part of a pass.
Answer plan_sm90_backward_part(const Request& request);

KernelEntry sm90_backward_kernel();

/// forward/sm90 and backward/sm90 over lists of blocks of keys: sm90_lists.cpp.
Answer plan_sm90_lists(const Request& request);
Answer plan_sm90_backward_lists(const Request& request);

}  // namespace flash_attention::plan
