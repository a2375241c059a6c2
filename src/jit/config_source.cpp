#include <sstream>
#include <type_traits>

#include "plan/kernel_config.h"

namespace flash_attention {
namespace {

const char* source(abi::Type type) {
  switch (type) {
    case abi::Type::float32:
      return "Type::float32";
    case abi::Type::float16:
      return "Type::float16";
    case abi::Type::bfloat16:
      return "Type::bfloat16";
    case abi::Type::e4m3:
      return "Type::e4m3";
    case abi::Type::e5m2:
      return "Type::e5m2";
    case abi::Type::int8:
      return "Type::int8";
    case abi::Type::nvfp4:
      return "Type::nvfp4";
    case abi::Type::mxfp4:
      return "Type::mxfp4";
    case abi::Type::int4:
      return "Type::int4";
  }
  return "";
}

const char* source(abi::DqMode mode) {
  switch (mode) {
    case abi::DqMode::atomic:
      return "DqMode::atomic";
    case abi::DqMode::ordered:
      return "DqMode::ordered";
    case abi::DqMode::separate_kernel:
      return "DqMode::separate_kernel";
    case abi::DqMode::direct:
      return "DqMode::direct";
  }
  return "";
}

const char* source(abi::Overlap overlap) {
  switch (overlap) {
    case abi::Overlap::pairs:
      return "Overlap::pairs";
    case abi::Overlap::steps:
      return "Overlap::steps";
    case abi::Overlap::serial_dP:
      return "Overlap::serial_dP";
  }
  return "";
}

const char* source(abi::KeyOrder order) {
  switch (order) {
    case abi::KeyOrder::forwards:
      return "KeyOrder::forwards";
    case abi::KeyOrder::backwards:
      return "KeyOrder::backwards";
    case abi::KeyOrder::from_diagonal:
      return "KeyOrder::from_diagonal";
  }
  return "";
}

const char* source(abi::MaskWords words) {
  switch (words) {
    case abi::MaskWords::none:
      return "MaskWords::none";
    case abi::MaskWords::own:
      return "MaskWords::own";
    case abi::MaskWords::given:
      return "MaskWords::given";
  }
  return "";
}

/// Designated initialisers. Members with their default are left out, so that the unit shows what is special.
class Initialiser {
 public:
  explicit Initialiser(const char* type) { text_ << type << '{'; }

  void member(const char* name, bool value, bool initial) { put(name, value, initial, value ? "true" : "false"); }
  void member(const char* name, int value, int initial) { put(name, value, initial, std::to_string(value)); }
  template <class Enum>
  requires std::is_enum_v<Enum>
  void member(const char* name, Enum value, Enum initial) { put(name, value, initial, source(value)); }
  void member(const char* name, const std::string& value) { put(name, 1, 0, value); }
  std::string done() const { return text_.str() + "}"; }

 private:
  template <class T>
  void put(const char* name, T value, T initial, const std::string& text) {
    if (value == initial) return;
    text_ << (first_ ? "." : ", .") << name << " = " << text;
    first_ = false;
  }
  std::ostringstream text_;
  bool first_ = true;
};

#define MEMBER(name) out.member(#name, config.name, initial.name)

std::string to_source(const abi::Features& config) {
  const abi::Features initial;
  Initialiser out("");
  MEMBER(dtype);
  MEMBER(bias_dtype);
  MEMBER(packed);
  MEMBER(seqused_q);
  MEMBER(seqused_kv);
  MEMBER(key_lengths);
  MEMBER(left_padding);
  MEMBER(paged);
  MEMBER(window_left);
  MEMBER(window_right);
  MEMBER(chunk);
  MEMBER(top_left);
  MEMBER(softcap);
  MEMBER(bias);
  MEMBER(alibi);
  MEMBER(mask);
  MEMBER(dropout);
  MEMBER(sink);
  MEMBER(hidden_bounds);
  MEMBER(block_mask);
  MEMBER(mask_map);
  MEMBER(precomputed_mask_bits);
  MEMBER(score_program);
  MEMBER(score_hides);
  MEMBER(mask_program);
  MEMBER(kv_dtype);
  MEMBER(kv_scales);
  MEMBER(token_scales);
  MEMBER(latent);
  MEMBER(narrow_queries);
  MEMBER(q_scales);
  MEMBER(one_product);
  MEMBER(fp32_products);
  MEMBER(key_list);
  MEMBER(key_set);
  MEMBER(max_logit);
  MEMBER(key_mass);
  MEMBER(entropy);
  MEMBER(key_bits);
  MEMBER(draft_bits);
  MEMBER(bit_offsets);
  MEMBER(sequence_windows);
  MEMBER(list_bits);
  MEMBER(list_of_query);
  MEMBER(stacked_heads);
  MEMBER(kv_group);
  return out.done();
}

std::string to_source(const abi::ForwardLoop& config) {
  const abi::ForwardLoop initial;
  Initialiser out("");
  MEMBER(key_order);
  MEMBER(mask_words);
  MEMBER(pingpong);
  MEMBER(holds_queries);
  MEMBER(uniform_by_vote);
  MEMBER(keeps_tested);
  MEMBER(skips_listed);
  return out.done();
}

std::string to_source(const abi::BackwardLoop& config) {
  const abi::BackwardLoop initial;
  Initialiser out("");
  MEMBER(overlap);
  MEMBER(late_statistics);
  MEMBER(tests_cap);
  return out.done();
}

std::string to_source(const abi::ForwardConfig& config) {
  const abi::ForwardConfig initial;
  Initialiser out("ForwardConfig");
  out.member("features", to_source(config.features));
  MEMBER(head_dim);
  MEMBER(head_dim_v);
  MEMBER(block_q);
  MEMBER(block_kv);
  MEMBER(num_warps);
  MEMBER(num_stages);
  MEMBER(group);
  MEMBER(split_tiles);
  MEMBER(producer_warp);
  MEMBER(pair_tiles);
  MEMBER(row_grid);
  MEMBER(key_groups);
  MEMBER(strided_items);
  MEMBER(one_row_tile);
  MEMBER(item_blocks);
  MEMBER(read_once);
  MEMBER(head_grid);
  MEMBER(tiles_in_flight);
  MEMBER(dynamic_scheduler);
  MEMBER(page_rows);
  MEMBER(bias_stages);
  MEMBER(late_values);
  MEMBER(split_keys);
  MEMBER(transposes_late);
  if (config.loop != initial.loop) out.member("loop", to_source(config.loop));
  return out.done();
}

std::string to_source(const abi::BackwardConfig& config) {
  const abi::BackwardConfig initial;
  Initialiser out("BackwardConfig");
  out.member("features", to_source(config.features));
  MEMBER(head_dim);
  MEMBER(head_dim_v);
  MEMBER(block_q);
  MEMBER(block_kv);
  MEMBER(num_warps);
  MEMBER(num_stages);
  MEMBER(dq_mode);
  MEMBER(key_sums);
  MEMBER(dlse);
  MEMBER(dbias);
  MEMBER(dsink);
  MEMBER(bias_boxes);
  MEMBER(interleave_heads);
  MEMBER(split_first);
  MEMBER(statistics_by_product);
  MEMBER(early_dq);
  MEMBER(mask_bits);
  if (config.loop != initial.loop) out.member("loop", to_source(config.loop));
  return out.done();
}

std::string to_source(const abi::AppendConfig& config) {
  const abi::AppendConfig initial;
  Initialiser out("AppendConfig");
  MEMBER(dtype);
  MEMBER(cache_dtype);
  MEMBER(rotary_dtype);
  MEMBER(norm_dtype);
  MEMBER(head_dim);
  MEMBER(head_dim_v);
  MEMBER(rotary_dim);
  MEMBER(vector);
  MEMBER(lanes);
  MEMBER(interleaved);
  MEMBER(q_norm);
  MEMBER(k_norm);
  MEMBER(plus_one);
  MEMBER(angles);
  MEMBER(sections);
  MEMBER(sections_interleaved);
  MEMBER(in_rows);
  MEMBER(paged);
  MEMBER(scales);
  MEMBER(token_scales);
  MEMBER(group);
  return out.done();
}

#undef MEMBER

std::string to_source(const std::string& source) { return source; }

}  // namespace

std::string to_source(const LaunchConfig& config) {
  if (config.value() == nullptr) return {};
  return std::visit([](const auto& value) { return to_source(value); }, config.value()->value);
}

LaunchConfig::LaunchConfig(std::string source)
    : value_(source.empty() ? nullptr : std::make_shared<plan::KernelConfig>(plan::KernelConfig{std::move(source)})) {}

bool operator==(const LaunchConfig& x, const LaunchConfig& y) { return to_source(x) == to_source(y); }

}  // namespace flash_attention
