#include "plan/features.h"

#include <gtest/gtest.h>

#include "api/checks/validate.h"
#include "plan/kernel_config.h"

namespace flash_attention {
namespace {

/// A feature that is off in the configuration leaves no instruction behind, so each must be on where its option is.
TEST(Features, EveryOptionIsAFeature) {
  struct Option {
    const char* text;
    void (*set)(Problem&);
  };
  const Option options[] = {
      {".packed = true", [](Problem& p) { p.packed = true, p.total_q = p.total_kv = 40; }},
      {".seqused_q = true", [](Problem& p) { p.seqused_q = true; }},
      {".seqused_kv = true", [](Problem& p) { p.seqused_kv = true; }},
      {".key_lengths = true", [](Problem& p) { p.key_lengths = true; }},
      {".left_padding = true", [](Problem& p) { p.left_padding = true; }},
      {".window_left = true", [](Problem& p) { p.window_left = 0; }},
      {".window_right = true", [](Problem& p) { p.window_right = 0; }},
      {".window_right = true", [](Problem& p) { p.causal = true; }},
      {".top_left = true", [](Problem& p) { p.causal = true, ++p.seq_kv, p.alignment = Alignment::top_left; }},
      {".top_left = true", [](Problem& p) { p.window_left = 3, ++p.seq_kv, p.alignment = Alignment::top_left; }},
      {".softcap = true", [](Problem& p) { p.softcap = 1e-3f; }},
      {".bias = true", [](Problem& p) { p.bias.present = true; }},
      {".bias_dtype = Type::bfloat16", [](Problem& p) { p.bias = {.present = true, .dtype = Dtype::bfloat16}; }},
      {".alibi = true", [](Problem& p) { p.alibi = true; }},
      {".mask = true", [](Problem& p) { p.mask.present = true; }},
      {".hidden_bounds = 2", [](Problem& p) { p.hidden_rows.bounds = 2; }},
      {".block_mask = true", [](Problem& p) { p.block_mask = {.block_q = 64, .block_kv = 64}; }},
      {".key_bits = true", [](Problem& p) { p.bit_mask = {.kind = BitMaskKind::keys, .offsets = true}; }},
      {".draft_bits = true", [](Problem& p) { p.bit_mask = {.kind = BitMaskKind::drafts, .row_bytes = 8}; }},
      {".bit_offsets = true", [](Problem& p) { p.bit_mask = {.kind = BitMaskKind::keys, .offsets = true}; }},
      {".sequence_windows = true", [](Problem& p) { p.sequence_windows = true; }},
      {".dropout = true", [](Problem& p) { p.dropout_p = 1e-6f; }},
      {".sink = true", [](Problem& p) { p.sink = true; }},
      {".dtype = Type::float16", [](Problem& p) { p.dtype = Dtype::float16; }},
      {".dtype = Type::bfloat16", [](Problem& p) { p.dtype = Dtype::bfloat16; }},
  };
  const Problem plain{.seq_q = 40, .seq_kv = 40, .head_dim = 16};
  const auto source = [](const Problem& p) {
    abi::ForwardConfig config;
    config.features = plan::features_of(api::normalise(p, Pass::forward));
    return to_source(plan::launch_config(config));
  };
  for (const Option& option : options) {
    Problem p = plain;
    option.set(p);
    EXPECT_EQ(source(plain).find(option.text), std::string::npos) << option.text;
    EXPECT_NE(source(p).find(option.text), std::string::npos) << option.text << " is not in " << source(p);
  }
}

/// delta and dsink are compiled once for all masks, biases and, dsink, types and sizes: their configurations hold no more
/// than they read.
TEST(Features, DeltaAndSinkGradientAreCompiledOnce) {
  const auto source = [](const Problem& p, std::string_view entry) {
    const DeviceInfo device{.device = {.kind = DeviceKind::cuda}, .arch = 80, .num_sms = 108, .shared_bytes = 163 * 1024};
    for (const Launch& launch : make_plan(p, Pass::backward, device, "backward/sm80").launches) {
      if (launch.entry == entry) return to_source(launch.config);
    }
    return std::string("no ") + std::string(entry);
  };
  const Problem plain{.seq_q = 40, .seq_kv = 40, .head_dim = 64, .dtype = Dtype::float16, .sink = true};
  Problem options = plain;
  options.causal = options.alibi = true, options.softcap = 3, options.dropout_p = 0.1f;
  options.bias = {.present = true, .q_stride = 40};
  Problem wide = options, packed = plain, wide_packed = plain;
  wide.head_dim = 128, wide.head_dim_v = 64;
  packed.packed = true, packed.total_q = packed.total_kv = 40;
  wide_packed = packed;
  wide_packed.head_dim = 128, wide_packed.head_dim_v = 64;
  for (const char* entry : {"backward_delta", "backward_dsink"}) {
    EXPECT_EQ(source(plain, entry), source(options, entry));
    EXPECT_EQ(source(plain, entry), source(wide, entry));
    EXPECT_NE(source(plain, entry), source(packed, entry));
  }
  EXPECT_NE(source(packed, "backward_delta"), source(wide_packed, "backward_delta"));  // clears as many columns
  Problem other_type = plain;
  other_type.dtype = Dtype::bfloat16;
  EXPECT_NE(source(plain, "backward_delta"), source(other_type, "backward_delta"));
  EXPECT_EQ(source(plain, "backward_dsink"), source(other_type, "backward_dsink"));
}

}  // namespace
}  // namespace flash_attention
