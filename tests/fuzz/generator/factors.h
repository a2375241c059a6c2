#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flash_attention::fuzz {

/// What a problem can differ in. The first ones are part of a GPU kernel's configuration: problems that agree in them share
/// what was compiled.
enum Factor : int {
  dtype,
  head_dim,
  head_dim_v,
  window,
  chunk,
  alignment,
  softcap,
  bias,
  alibi,
  mask,
  hidden_rows,
  block_mask,
  packed,
  paged,
  left_padding,
  key_lengths,
  seqused_q,
  seqused_kv,
  dropout,
  sink,
  deterministic,
  program,
  kv_dtype,
  kv_scales,
  narrow_queries,
  latent,
  invariant,
  scale,  // from here on: known when the kernel runs
  group,
  queries,
  keys,
  batch,
  layout,
  inputs,
  bias_shape,
  slopes,
  mask_shape,
  hidden_shape,
  block_shape,
  bounds,
  tail,
  page_size,
  sinks,
  dlse,
  dbias,
  dsink,
  dprogram,
  num_factors,
};
constexpr int num_compiled = scale;

std::string_view name_of(Factor factor);
const std::vector<std::string_view>& levels_of(Factor factor);

/// A choice of one level for each factor.
class Row {
 public:
  Row() : levels_(num_factors, -1) {}

  int operator[](int factor) const { return levels_[factor]; }
  int& operator[](int factor) { return levels_[factor]; }
  std::string_view level(Factor factor) const { return levels_of(factor)[levels_[factor]]; }
  bool is(Factor factor, std::string_view level) const;

 private:
  std::vector<int> levels_;
};

std::string to_string(const Row& row);

/// Whether a problem can have both: the shape of a bias needs a bias, a gradient of the sink needs a sink.
bool go_together(Factor a, int level_a, Factor b, int level_b);

/// The levels that problems are drawn from.
class Domain {
 public:
  Domain();  // all of them

  Domain& without(Factor factor, const std::vector<std::string_view>& levels);
  Domain& only(Factor factor, const std::vector<std::string_view>& levels);
  bool has(int factor, int level) const { return allowed_[factor][level]; }

 private:
  std::vector<std::vector<bool>> allowed_;
};

/// The levels that a kernel takes, by its name. "cpu/prefill", "cpu/backward", "forward/portable" and "backward/portable"
/// take all that is taken at all.
Domain domain_of(std::string_view kernel);

/// The architecture on which the emulator runs the kernel.
int emulated_arch_of(std::string_view kernel);

}  // namespace flash_attention::fuzz
