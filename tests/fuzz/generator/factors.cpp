#include "fuzz/generator/factors.h"

#include <algorithm>
#include <stdexcept>

#include "flash_attention/attention.h"
#include "flash_attention/error.h"
#include "plan/kernel_table.h"

namespace flash_attention::fuzz {
namespace {

struct Description {
  Factor factor;
  std::string_view name;
  std::vector<std::string_view> levels;
};

/// Which axes a tensor over the scores has (batch, head, query); the others are broadcast.
#define FLASH_ATTENTION_SHAPES "unused", "keys", "q", "h", "hq", "b", "bq", "bh", "bhq"

const std::vector<Description>& table() {
  static const std::vector<Description> rows{
      {dtype, "dtype", {"float32", "float16", "bfloat16", "float32_fast"}},  // fast: its precision
      {head_dim,
       "head_dim",
       {"8", "16..56", "64", "72..120", "128", "136..192", "200..248", "256", "any", "264..504", "512..576"}},
      {head_dim_v, "head_dim_v", {"same", "smaller", "larger"}},
      {window, "window", {"none", "causal", "left", "right", "both", "causal_left"}},
      {chunk, "chunk", {"off", "on"}},
      {alignment, "alignment", {"bottom_right", "top_left"}},
      {softcap, "softcap", {"off", "narrow", "wide"}},
      {bias, "bias", {"off", "float32", "float16", "bfloat16"}},
      {alibi, "alibi", {"off", "on"}},
      {mask, "mask", {"off", "on"}},
      {hidden_rows, "hidden_rows", {"off", "one", "two", "four"}},  // bounds
      {block_mask, "block_mask", {"off", "on"}},
      {packed, "packed", {"off", "on"}},
      {paged, "paged", {"off", "full", "used"}},  // used: as much of it as seqused_kv says
      {left_padding, "left_padding", {"off", "on"}},
      {key_lengths, "key_lengths", {"off", "on"}},
      {seqused_q, "seqused_q", {"off", "on"}},
      {seqused_kv, "seqused_kv", {"off", "on"}},
      {dropout, "dropout", {"off", "some", "half"}},
      {sink, "sink", {"off", "on"}},
      {deterministic, "deterministic", {"off", "on"}},
      {program, "program", {"off", "score", "mask", "both", "hides"}},  // hides: by a score of -inf
      {kv_dtype, "kv_dtype", {"off", "e4m3", "e5m2", "int8"}},
      {kv_scales, "kv_scales", {"unused", "none", "tensor", "head", "token"}},
      {narrow_queries, "narrow_queries", {"off", "none", "tensor", "head"}},  // queries in 8 bits, by their scales
      {latent, "latent", {"off", "on"}},
      {invariant, "invariant", {"off", "on"}},
      {scale, "scale", {"default", "given", "negative", "zero"}},
      {group, "group", {"1", "2", "3", "8"}},
      {queries, "queries", {"0", "1", "few", "prime", "edge", "long"}},
      {keys, "keys", {"0", "1", "few", "prime", "edge", "long"}},
      {batch, "batch", {"1", "2", "3", "0", "many"}},
      {layout, "layout", {"dense", "heads_first", "gaps", "odd", "fours", "broadcast", "reversed"}},
      {inputs,
       "inputs",
       {"normal", "large", "peaked", "growing", "spike", "falling", "ties", "denormal", "zeros", "nan_key", "nan_value",
        "nan_query", "nan_dout", "infinite_bias"}},
      {bias_shape, "bias_shape", {FLASH_ATTENTION_SHAPES}},
      {slopes, "slopes", {"unused", "ordinary", "strong", "batch", "strong_batch"}},
      {mask_shape, "mask_shape", {FLASH_ATTENTION_SHAPES}},
      {hidden_shape, "hidden_shape", {"unused", "shared", "h", "b", "bh"}},
      {block_shape, "block_shape", {"unused", "q", "hq", "bq", "bhq"}},
      {bounds, "bounds", {"unused", "exact", "loose", "none"}},
      {tail, "tail", {"unused", "none", "some"}},                             // rows behind the last sequence
      {page_size, "page_size", {"unused", "1", "few", "16", "64", "whole"}},  // whole: one page a sequence
      {sinks, "sinks", {"unused", "ordinary", "strong", "infinite"}},
      {dlse, "dlse", {"off", "on"}},
      {dbias, "dbias", {"off", "on"}},
      {dsink, "dsink", {"off", "on"}},
      {dprogram, "dprogram", {"off", "on"}},
  };
  return rows;
}

#undef FLASH_ATTENTION_SHAPES

/// A factor that says more about another one, and has nothing to say where that is off.
struct Detail {
  Factor factor, of;
};
constexpr Detail details[] = {{bias_shape, bias},        {slopes, alibi},  {mask_shape, mask}, {hidden_shape, hidden_rows},
                              {block_shape, block_mask}, {bounds, packed}, {tail, packed},     {page_size, paged},
                              {kv_scales, kv_dtype},     {sinks, sink}};

/// A level that needs another factor to be on.
struct Need {
  Factor factor;
  std::string_view level;
  Factor of;
};
constexpr Need needs[] = {{dbias, "on", bias},
                          {dbias, "on", bias_shape},
                          {dsink, "on", sink},
                          {dsink, "on", sinks},
                          {inputs, "infinite_bias", bias},
                          {inputs, "infinite_bias", bias_shape},
                          {narrow_queries, "none", kv_dtype},  // they are of the keys' type
                          {narrow_queries, "none", kv_scales},
                          {narrow_queries, "tensor", kv_dtype},
                          {narrow_queries, "tensor", kv_scales},
                          {narrow_queries, "head", kv_dtype},
                          {narrow_queries, "head", kv_scales}};

/// Two levels that no problem has together.
struct Exclusion {
  Factor factor;
  std::string_view level;
  Factor other;
  std::string_view other_level;
};
constexpr Exclusion exclusions[] = {
    {paged, "full", seqused_kv, "on"},
    {paged, "used", seqused_kv, "off"},
    {paged, "full", packed, "on"},  // packed queries do not say how many keys there are
    {paged, "full", bounds, "exact"},
    {paged, "full", bounds, "loose"},
    {paged, "full", bounds, "none"},
    {paged, "full", tail, "none"},
    {paged, "full", tail, "some"},
    {tail, "some", batch, "0"},         // rows need a sequence
    {batch, "many", queries, "prime"},  // so that the oracle stays quick
    {batch, "many", queries, "edge"},
    {batch, "many", queries, "long"},
    {batch, "many", keys, "prime"},
    {batch, "many", keys, "edge"},
    {batch, "many", keys, "long"},
    {dprogram, "on", program, "off"},  // a mask has no gradient
    {dprogram, "on", program, "mask"},
    {kv_dtype, "int8", inputs, "nan_key"},  // it has no NaN
    {kv_dtype, "int8", inputs, "nan_value"},
    {kv_scales, "head", layout, "broadcast"},  // what is shared has one scale
    {kv_scales, "token", layout, "broadcast"},
    {narrow_queries, "none", kv_dtype, "int8"},
    {narrow_queries, "tensor", kv_dtype, "int8"},
    {narrow_queries, "head", kv_dtype, "int8"},
    {latent, "on", narrow_queries, "none"},
    {latent, "on", narrow_queries, "tensor"},
    {latent, "on", narrow_queries, "head"},
    {latent, "on", head_dim_v, "same"},  // a key is its value and some columns more
    {latent, "on", head_dim_v, "larger"},
    {latent, "on", head_dim, "8"},
    {latent, "on", head_dim, "any"},
};

int index_of(Factor factor, std::string_view level) {
  const auto& levels = levels_of(factor);
  for (std::size_t i = 0; i < levels.size(); ++i)
    if (levels[i] == level) return static_cast<int>(i);
  throw std::invalid_argument(std::string(name_of(factor)) + " has no level " + std::string(level));
}

/// Some kernels take programs that change scores and none that hide keys.
bool takes_masks_of_programs(const plan::KernelEntry& entry) {
  if (entry.device == DeviceKind::cpu) return true;
  Problem small{.seq_q = 64, .seq_kv = 64, .head_dim = 64, .dtype = Dtype::float16, .program = "v = eq i j\nvisible = v\n"};
  if (entry.name.ends_with("/tf32")) small.dtype = Dtype::float32, small.precision = Precision::fast;
  if (entry.name.ends_with("/fp32")) small.dtype = Dtype::float32, small.precision = Precision::ieee;
  if (entry.takes.narrow_queries && entry.name.ends_with("_fp8")) small.q_dtype = small.kv_dtype = Dtype::float8_e4m3;
  const DeviceInfo device = device_info({.kind = DeviceKind::emulator, .emulated_arch = emulated_arch_of(entry.name)});
  try {
    make_plan(small, entry.pass, device, entry.name);
  } catch (const Error&) {
    return false;
  }
  return true;
}

}  // namespace

std::string_view name_of(Factor factor) { return table()[factor].name; }
const std::vector<std::string_view>& levels_of(Factor factor) { return table()[factor].levels; }

bool Row::is(Factor factor, std::string_view level) const { return levels_[factor] == index_of(factor, level); }

std::string to_string(const Row& row) {
  std::string text;
  for (int factor = 0; factor < num_factors; ++factor) {
    const Factor f = static_cast<Factor>(factor);
    if (row[factor] == 0) continue;  // the first level is the plain one
    text += (text.empty() ? "" : " ") + std::string(name_of(f)) + "=" + std::string(row.level(f));
  }
  return text;
}

bool go_together(Factor a, int level_a, Factor b, int level_b) {
  // A weight that a float holds as 0 may or may not be multiplied by NaN.
  const auto vanishes = [](Factor factor, int level, Factor other, int other_level) {
    return factor == inputs && (other == slopes || other == sinks) && levels_of(factor)[level].starts_with("nan_") &&
           levels_of(other)[other_level].starts_with("strong");
  };
  if (vanishes(a, level_a, b, level_b) || vanishes(b, level_b, a, level_a)) return false;
  const auto clash = [](Factor factor, int level, Factor other, int other_level) {
    for (const Detail& d : details) {
      if (d.factor == factor && d.of == other && (level == 0) != (other_level == 0)) return true;
    }
    if (factor == bounds && other == tail && (level == 0) != (other_level == 0)) return true;  // both are of packed
    for (const Need& n : needs) {
      if (n.factor == factor && n.of == other && levels_of(factor)[level] == n.level && other_level == 0) return true;
    }
    for (const Exclusion& e : exclusions) {
      if (e.factor == factor && e.other == other && levels_of(factor)[level] == e.level &&
          levels_of(other)[other_level] == e.other_level)
        return true;
    }
    return false;
  };
  return !clash(a, level_a, b, level_b) && !clash(b, level_b, a, level_a);
}

Domain::Domain() {
  for (const Description& d : table()) allowed_.emplace_back(d.levels.size(), true);
}

Domain& Domain::without(Factor factor, const std::vector<std::string_view>& levels) {
  for (const std::string_view level : levels) allowed_[factor][index_of(factor, level)] = false;
  return *this;
}

Domain& Domain::only(Factor factor, const std::vector<std::string_view>& levels) {
  allowed_[factor].assign(allowed_[factor].size(), false);
  for (const std::string_view level : levels) allowed_[factor][index_of(factor, level)] = true;
  return *this;
}

int emulated_arch_of(std::string_view kernel) {
  const auto has = [&](std::string_view part) { return kernel.find(part) != std::string_view::npos; };
  return has("sm100") ? 100 : has("sm90") ? 90 : has("sm89") ? 89 : 80;
}

Domain domain_of(std::string_view kernel) {
  const auto table = plan::kernel_table();
  const auto entry = std::find_if(table.begin(), table.end(), [&](const auto& e) { return e.name == kernel; });
  if (entry == table.end()) throw std::invalid_argument("there is no kernel " + std::string(kernel));
  Domain domain;
  if (!entry->takes.pages) domain.only(paged, {"off"}).only(page_size, {"unused"});
  if (!entry->takes.left_padding) domain.only(left_padding, {"off"});
  if (!entry->takes.hidden_rows) domain.only(hidden_rows, {"off"}).only(hidden_shape, {"unused"});
  if (!entry->takes.block_mask) domain.only(block_mask, {"off"}).only(block_shape, {"unused"});
  if (entry->takes.programs && !takes_masks_of_programs(*entry)) domain.without(program, {"mask", "both"});
  if (!entry->takes.programs) domain.only(program, {"off"}).only(dprogram, {"off"});
  if (!entry->takes.narrow_keys) domain.only(kv_dtype, {"off"}).only(kv_scales, {"unused"});
  if (!entry->takes.narrow_queries) domain.only(narrow_queries, {"off"});
  if (!entry->takes.latent) domain.only(latent, {"off"});
  if (entry->pass == Pass::forward) {
    domain.only(dlse, {"off"}).only(dbias, {"off"}).only(dsink, {"off"}).only(dprogram, {"off"});
    domain.without(inputs, {"nan_dout"});
    if (!entry->takes.invariant) domain.only(invariant, {"off"});
  }
  if (kernel.ends_with("/listed")) domain.only(dbias, {"off"}).only(invariant, {"off"});
  if (kernel.ends_with("/tf32") || kernel.ends_with("/fp32")) {  // whoever runs these for fp32 sets its precision
    domain.only(dtype, {"float32_fast"}).without(layout, {"odd"}).without(scale, {"negative", "zero"});
  } else {
    domain.without(dtype, {"float32_fast"});
  }
  if (kernel.ends_with("/sm80") || kernel.ends_with("/sm90")) {
    domain.without(dtype, {"float32"}).without(layout, {"odd", "fours"});
    if (kernel != "backward/sm90") domain.without(scale, {"negative", "zero"});
  }
  if (kernel.starts_with("decode/")) domain.only(dropout, {"off"}).without(queries, {"edge", "long"});
  if (kernel == "decode/mla_sm90") {
    domain.only(latent, {"on"}).only(head_dim, {"512..576"}).without(dtype, {"float32"}).without(kv_scales, {"token"});
    domain.without(layout, {"odd", "fours"}).without(scale, {"negative", "zero"});
  }
  if (kernel.ends_with("_fp8")) {
    domain.without(narrow_queries, {"off"}).without(kv_scales, {"token"}).without(dtype, {"float32"});
    domain.without(head_dim, {"8", "any", "264..504", "512..576"}).without(scale, {"negative", "zero"});
    domain.without(layout, {"odd", "fours"});
  }
  if (kernel == "forward/sm90_fp8") {
    domain.without(page_size, {"1", "few", "whole"}).only(mask, {"off"}).only(dropout, {"off"});
    domain.without(layout, {"broadcast", "reversed"});
    domain.without(queries, {"0"}).without(keys, {"0"}).without(batch, {"0"});
  }
  if (kernel == "forward/sm100") {
    domain.without(dtype, {"float32"}).without(layout, {"odd", "fours", "broadcast", "reversed"}).only(dropout, {"off"});
    domain.without(head_dim, {"256", "264..504", "512..576"}).without(scale, {"negative", "zero"});
    domain.without(queries, {"0"}).without(keys, {"0"}).without(batch, {"0"});
  }
  if (kernel == "forward/sm90") domain.without(page_size, {"1", "few", "whole"});
  if (kernel.ends_with("/sm90"))
    domain.without(layout, {"broadcast", "reversed"}).without(queries, {"0"}).without(keys, {"0"}).without(batch, {"0"});
  return domain;
}

}  // namespace flash_attention::fuzz
