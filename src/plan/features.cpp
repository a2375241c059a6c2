#include "plan/features.h"

#include <algorithm>

#include "plan/program.h"
#include "program/program.h"

namespace flash_attention::plan {

static_assert(static_cast<int>(abi::Type::bfloat16) == static_cast<int>(Dtype::bfloat16) &&
              static_cast<int>(abi::Type::float16) == static_cast<int>(Dtype::float16) &&
              static_cast<int>(abi::Type::e4m3) == static_cast<int>(Dtype::float8_e4m3) &&
              static_cast<int>(abi::Type::e5m2) == static_cast<int>(Dtype::float8_e5m2) &&
              static_cast<int>(abi::Type::int8) == static_cast<int>(Dtype::int8) &&
              static_cast<int>(abi::Type::nvfp4) == static_cast<int>(Dtype::nvfp4) &&
              static_cast<int>(abi::Type::int4) == static_cast<int>(Dtype::int4));

abi::Features features_of(const Problem& p) {
  abi::Features features{
      .dtype = static_cast<abi::Type>(p.dtype),
      .bias_dtype = p.bias.present ? static_cast<abi::Type>(p.bias.dtype) : abi::Type::float32,
      .packed = p.packed,
      .seqused_q = p.seqused_q,
      .seqused_kv = p.seqused_kv,
      .key_lengths = p.key_lengths,
      .left_padding = p.left_padding,
      .paged = p.page_size != 0,
      .window_left = p.window_left >= 0 || p.sequence_windows,
      .window_right = p.window_right >= 0 || p.sequence_windows,
      .chunk = p.attention_chunk != 0,
      .top_left = p.alignment == Alignment::top_left && (p.window_left >= 0 || p.window_right >= 0 || p.sequence_windows),
      .softcap = p.softcap > 0,
      .bias = p.bias.present,
      .alibi = p.alibi,
      .mask = p.mask.present,
      .dropout = p.dropout_p > 0,
      .sink = p.sink,
      .hidden_bounds = p.hidden_rows.bounds,
      .block_mask = p.block_mask.block_q != 0,
      .kv_dtype = *p.kv_dtype == p.dtype ? abi::Type::float32 : static_cast<abi::Type>(*p.kv_dtype),
      .kv_scales = p.kv_scales != ScaleKind::none,
      .token_scales = p.kv_scales == ScaleKind::token,
      .latent = p.latent,
      .narrow_queries = *p.q_dtype != p.dtype,
      .q_scales = p.q_scales != ScaleKind::none,
      .one_product = p.precision == Precision::tf32,
      .key_list = p.key_list.kind != KeyListKind::none,
      .key_set = p.key_list.kind == KeyListKind::blocks,
      .max_logit = p.return_max_logit,
      .key_mass = p.return_key_mass,
      .entropy = p.return_entropy,
      .key_bits = p.bit_mask.kind == BitMaskKind::keys,
      .draft_bits = p.bit_mask.kind == BitMaskKind::drafts,
      .bit_offsets = p.bit_mask.offsets,
      .sequence_windows = p.sequence_windows,
      .kv_group = static_cast<int>(p.kv_group)};
  if (!p.program.empty()) {
    const ProgramTraits program = program_traits(p);
    features.score_program = program.score;
    features.score_hides = program.score && program.hides;
    features.mask_program = program.visible;
  }
  return features;
}

abi::Features row_features(const abi::Features& features) {
  return {.dtype = features.dtype,
          .packed = features.packed,
          .seqused_q = features.seqused_q,
          .seqused_kv = features.seqused_kv,
          .stacked_heads = features.stacked_heads};
}

abi::Features with_map(abi::Features features) {
  features.mask_map = features.mask;
  return features;
}

std::int64_t map_heads(const Problem& p) {
  if (!p.program.empty() && program::parsed(p.program)->visible_by_head) return p.heads_q;
  if (p.block_mask.block_q != 0 && p.block_mask.head_stride != 0) return p.heads_q;
  if (p.key_list.kind == KeyListKind::blocks) return p.key_list.heads;
  if (p.mask.present && p.mask.head_stride != 0) return p.heads_q;
  return p.hidden_rows.bounds != 0 && p.hidden_rows.head_stride != 0 ? p.heads_kv : 1;
}

std::int64_t map_batches(const Problem& p) {
  const bool differ = p.packed || p.key_list.kind == KeyListKind::blocks || (p.hidden_rows.bounds != 0 && p.hidden_rows.batch_stride != 0) ||
                      (p.block_mask.block_q != 0 && p.block_mask.batch_stride != 0) ||
                      (p.mask.present && p.mask.batch_stride != 0) ||
                      (!p.program.empty() && program::parsed(p.program)->visible_by_batch);
  return differ ? p.batch : std::min<std::int64_t>(p.batch, 1);
}

}  // namespace flash_attention::plan
