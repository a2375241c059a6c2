#pragma once

#include <string>

#include "abi/config.h"
#include "plan/kernel_table.h"

// What forward/sm90, backward/sm90, decode/sm90 and the ladder's Hopper rungs share.

namespace flash_attention::plan {

/// Why TMA cannot address a tensor that the pass copies; empty where it can address all.
std::string reject_tma_strides(const Problem& problem, Pass pass);

/// The same of K and V alone, in pages or not.
std::string reject_tma_cache(const Problem& problem);

/// Whether K and V have no rows at all: no tensor map describes them.
bool has_no_key_rows(const Problem& problem);

/// Why no Hopper kernel can take the problem; empty where one might.
std::string reject_sm90(const Problem& problem, const DeviceInfo& device);

/// Whether forward/sm80 in tiles of 32 x 64 is faster than forward/sm90: few short rows, which are over before warps with
/// roles and tensor maps have begun.
bool is_short_for_sm90(const Request& request);

/// Keys of a box of TMA out of pages: as many as divide the page and the block of keys.
int rows_of_page_box(const Problem& problem, int block_kv);

/// Whether TMA brings the bias of forward/sm90, where its address allows.
bool has_bias_boxes(const Request& request);
/// The same of backward/sm90: there is room for boxes with heads of up to 64 columns.
bool has_backward_bias_boxes(const Request& request);

/// Where many heads and sequences share their masks, and the words of those are few, the launch that makes the map of tiles
/// makes the words, too, once for all. Returns the configuration of a kernel that reads them, which knows no mask by
/// itself: all masks have it in common. Else `config`.
abi::MaskWords choose_mask_words(const abi::ForwardConfig& config);
bool has_precomputed_mask_bits(const Problem& p, const abi::ForwardConfig& config);
abi::ForwardConfig with_precomputed_mask_bits(const Problem& problem, const abi::ForwardConfig& config, Plan& plan);
/// The same for backward/sm90: a launch behind that of the map makes words of the tiles that it shows in part
/// (kernels/mask/mask_bits.cuh).
bool has_mask_bits(const Problem& problem, const abi::BackwardConfig& config);
std::int64_t step_word_bytes(const Problem& problem);

/// The tensor maps of forward/sm90 and of the rungs like it. kernels/abi/tensor_maps.h.
std::vector<MapLayout> forward_sm90_maps(const Problem& problem, int block_q, int block_kv, bool bias_boxes = false);
/// Those of forward/sm90_fp8: V^T is in the workspace.
std::vector<MapLayout> forward_sm90_fp8_maps(const Problem& problem, const Plan& plan);

/// The loop of forward/sm90 for a configuration that is complete but for it.
abi::ForwardLoop choose_loop(const abi::ForwardConfig& config);
abi::KeyOrder choose_key_order(const abi::ForwardConfig& config);

/// The padded layout of row statistics and dQ sums: padded_rows in kernels/backward/sm90/parts/shape.cuh.
constexpr std::int64_t sm90_padded_rows(std::int64_t total_q, std::int64_t batch) {
  return (total_q + 68 * batch + 3) / 4 * 4;
}

struct BackwardSm90Structure;  // backward_sm90/structure.h

/// backward/sm90; with or without the heads of a group split between tasks if there are few key heads.
Plan lay_out_sm90_backward(const Request& request, bool whole, const BackwardSm90Structure& structure);

/// A part of a pass.
Answer plan_sm90_backward_part(const Request& request);

KernelEntry sm90_backward_kernel();

}  // namespace flash_attention::plan
