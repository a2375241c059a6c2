#include "flash_attention/problem.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <sstream>
#include <tuple>
#include <type_traits>

#include "api/option_table.h"
#include "plan/key_bounds.h"
#include "support/settings.h"

namespace flash_attention {
namespace {

auto fields(const Strides& s) { return std::tie(s.batch, s.seq, s.head); }

auto fields(const ScoreTensor& t) { return std::tie(t.present, t.dtype, t.batch_stride, t.head_stride, t.q_stride); }

auto fields(const HiddenRows& h) { return std::tie(h.bounds, h.batch_stride, h.head_stride); }

auto fields(const BlockMask& m) { return std::tie(m.block_q, m.block_kv, m.batch_stride, m.head_stride, m.q_stride); }

auto fields(const KeyList& l) { return std::tie(l.kind, l.entries, l.heads, l.block_q, l.block_kv, l.counts); }

auto fields(const BitMask& m) { return std::tie(m.kind, m.row_bytes, m.offsets); }

struct Hasher {
  std::uint64_t state = 0xcbf29ce484222325ull;

  void mix(std::uint64_t word) {
    state = (state ^ word) * 0x9E3779B97F4A7C15ull;
    state ^= state >> 29;
  }
  template <class T>
  void add(const T& value) {
    if constexpr (std::is_same_v<T, float>) {
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      mix(value == 0 ? 0 : bits);  // -0 equals 0
    } else if constexpr (std::is_same_v<T, std::optional<float>>) {
      mix(value.has_value());
      add(value.value_or(0.0f));
    } else if constexpr (std::is_same_v<T, std::string>) {
      mix(value.empty() ? 0 : std::hash<std::string>{}(value));
    } else if constexpr (std::is_same_v<T, decltype(Problem::program_sizes)>) {
      for (const auto& sizes : value) {
        for (const std::int64_t size : sizes) {
          if (size != 0) mix(static_cast<std::uint64_t>(size));
        }
      }
    } else if constexpr (std::is_same_v<T, std::optional<Dtype>>) {
      mix(value.has_value() ? 1 + static_cast<std::uint64_t>(*value) : 0);
    } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
      mix(static_cast<std::uint64_t>(value));
    } else if constexpr (std::is_same_v<T, Problem>) {
#define FLASH_ATTENTION_ADD_same(name) add(value.name);
#define FLASH_ATTENTION_ADD_parts(name) add(value.name);
#define FLASH_ATTENTION_ADD_call(name)
#define FLASH_ATTENTION_ADD_OPTION(kind, name, default_value, argument, expected, form, scores) \
  FLASH_ATTENTION_ADD_##form(name)
#define FLASH_ATTENTION_ADD(name, form, scores) FLASH_ATTENTION_ADD_##form(name)
      FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_ADD_OPTION)
      FLASH_ATTENTION_OTHER_FIELDS(FLASH_ATTENTION_ADD)
#undef FLASH_ATTENTION_ADD
#undef FLASH_ATTENTION_ADD_OPTION
#undef FLASH_ATTENTION_ADD_call
#undef FLASH_ATTENTION_ADD_parts
#undef FLASH_ATTENTION_ADD_same
    } else {
      std::apply([this](const auto&... field) { (this->add(field), ...); }, fields(value));
    }
  }
};

/// Visible (query, key) pairs of one head, if only the window counts.
double visible_scores(const Problem& p) {
  const std::int64_t seq_q = p.packed && p.batch == 1 ? p.total_q : p.seq_q;
  const std::int64_t seq_kv = p.packed && p.batch == 1 ? p.total_kv : p.seq_kv;
  if (p.key_list.kind != KeyListKind::none) {  // the listed pairs, though masks may hide some of them
    const std::int64_t blocks = std::min(p.key_list.entries, seq_kv / std::max<std::int64_t>(p.key_list.block_kv, 1) + 1);
    const bool set = p.key_list.kind == KeyListKind::blocks;
    const std::int64_t listed = set ? std::min(blocks * p.key_list.block_kv, seq_kv) : p.key_list.entries;
    return static_cast<double>(seq_q) * static_cast<double>(listed);
  }
  const std::int64_t right = p.causal ? 0 : p.window_right;
  if (p.window_left < 0 && right < 0 && p.attention_chunk == 0)
    return static_cast<double>(seq_q) * static_cast<double>(seq_kv);
  const std::int64_t shift = p.alignment == Alignment::bottom_right ? seq_kv - seq_q : 0;
  double count = 0;
  for (std::int64_t i = 0; i < seq_q; ++i) {
    const std::int64_t place = i + shift;
    std::int64_t first = p.window_left < 0 ? 0 : std::max<std::int64_t>(0, place - p.window_left);
    std::int64_t last = right < 0 ? seq_kv - 1 : std::min(seq_kv - 1, place + right);
    if (p.attention_chunk > 0) {
      const std::int64_t chunk = abi::chunk_begin(place, std::int64_t{0}, p.attention_chunk);
      first = std::max(first, chunk), last = std::min(last, chunk + p.attention_chunk - 1);
    }
    count += static_cast<double>(std::max<std::int64_t>(0, last - first + 1));
  }
  return count;
}

}  // namespace

bool invariant_by_default() { return support::invariant_in_environment(); }

std::size_t hash_value(const Problem& problem) {
  Hasher hasher;
  hasher.add(problem);
  return hasher.state;
}

std::string to_string(const Problem& p) {
  std::ostringstream out;
  out << to_string(p.dtype) << " batch " << p.batch << ", heads " << p.heads_q;
  if (p.heads_kv != p.heads_q) out << '/' << p.heads_kv;
  out << ", seq " << p.seq_q;
  if (p.seq_kv != p.seq_q) out << 'x' << p.seq_kv;
  out << ", head_dim " << p.head_dim;
  if (p.head_dim_v != 0 && p.head_dim_v != p.head_dim) out << '/' << p.head_dim_v;
  if (p.latent) out << " (latent)";
  if (p.packed) out << ", packed " << p.total_q << '/' << p.total_kv;
  if (p.causal || p.window_right == 0) out << ", causal";
  if (p.window_left >= 0 || p.window_right > 0) out << ", window (" << p.window_left << ", " << p.window_right << ')';
  if (p.attention_chunk != 0) out << ", chunks of " << p.attention_chunk;
  if (p.alignment == Alignment::top_left) out << ", top-left";
  if (p.scale) out << ", scale " << *p.scale;
  if (p.softcap != 0) out << ", softcap " << p.softcap;
  if (p.bias.present) out << ", bias " << to_string(p.bias.dtype);
  if (p.alibi) out << ", alibi";
  if (p.mask.present) out << ", mask";
  if (p.hidden_rows.bounds != 0) out << ", hidden rows by " << p.hidden_rows.bounds;
  if (p.block_mask.block_q != 0) out << ", blocks of " << p.block_mask.block_q << 'x' << p.block_mask.block_kv;
  if (p.key_list.kind != KeyListKind::none) {
    out << ", lists of " << p.key_list.entries << ' ' << to_string(p.key_list.kind);
    if (p.key_list.kind == KeyListKind::blocks) out << " of " << p.key_list.block_q << 'x' << p.key_list.block_kv;
    if (p.key_list.heads != 1) out << " for each of " << p.key_list.heads << " heads";
    if (p.key_list.counts) out << ", with counts";
  }
  if (p.bit_mask.kind != BitMaskKind::none) {
    out << ", bits of " << to_string(p.bit_mask.kind);
    if (p.bit_mask.kind == BitMaskKind::drafts) out << " in rows of " << p.bit_mask.row_bytes << " bytes";
    if (p.bit_mask.offsets) out << " from offsets";
  }
  if (p.sequence_windows) out << ", a window for each sequence";
  if (p.key_lengths) out << ", key_lengths";
  if (p.seqused_q) out << ", seqused_q";
  if (p.seqused_kv) out << ", seqused_kv";
  if (p.left_padding) out << ", left_padding";
  if (p.page_size != 0) out << ", " << p.num_pages << " pages of " << p.page_size;
  if (p.kv_dtype && *p.kv_dtype != p.dtype) out << ", keys of " << to_string(*p.kv_dtype);
  if (p.kv_dtype == Dtype::int4 && p.kv_group != 0) out << " in groups of " << p.kv_group;
  if (p.kv_scales != ScaleKind::none) out << ", scales of " << to_string(p.kv_scales);
  if (p.q_dtype && *p.q_dtype != p.dtype) out << ", queries of " << to_string(*p.q_dtype);
  if (p.q_scales != ScaleKind::none) out << ", their scales of " << to_string(p.q_scales);
  if (p.sink) out << ", sink";
  if (p.dropout_p != 0) out << ", dropout " << p.dropout_p;
  if (p.deterministic) out << ", deterministic";
  if (!p.program.empty()) {
    out << ", program of " << std::count(p.program.begin(), p.program.end(), '\n') + 1 << " lines";
  }
  if (p.invariant) out << ", invariant";
  if (p.precision != Precision::automatic) out << ", precision " << to_string(p.precision);
  if (p.return_max_logit) out << ", max_logit";
  if (p.return_key_mass) out << ", key_mass";
  if (p.return_entropy) out << ", entropy";
  return out.str();
}

std::string_view to_string(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32:
      return "float32";
    case Dtype::float16:
      return "float16";
    case Dtype::bfloat16:
      return "bfloat16";
    case Dtype::float8_e4m3:
      return "float8_e4m3";
    case Dtype::float8_e5m2:
      return "float8_e5m2";
    case Dtype::int8:
      return "int8";
    case Dtype::nvfp4:
      return "nvfp4";
    case Dtype::mxfp4:
      return "mxfp4";
    case Dtype::int4:
      return "int4";
  }
  return "unknown dtype";
}

std::string_view to_string(Pass pass) {
  switch (pass) {
    case Pass::forward:
      return "forward";
    case Pass::backward:
      return "backward";
    case Pass::standard_forward:
      return "standard_forward";
    case Pass::standard_backward:
      return "standard_backward";
    case Pass::tangent:
      return "tangent";
    case Pass::second:
      return "second";
  }
  return "unknown pass";
}

std::string_view to_string(Alignment alignment) {
  return alignment == Alignment::bottom_right ? "bottom_right" : "top_left";
}

std::string_view to_string(KeyListKind kind) {
  switch (kind) {
    case KeyListKind::none:
      return "none";
    case KeyListKind::keys:
      return "keys";
    case KeyListKind::blocks:
      return "blocks";
  }
  return "unknown kind";
}

std::string_view to_string(BitMaskKind kind) {
  switch (kind) {
    case BitMaskKind::none:
      return "none";
    case BitMaskKind::keys:
      return "keys";
    case BitMaskKind::drafts:
      return "drafts";
  }
  return "unknown kind";
}

std::string_view to_string(Precision precision) {
  switch (precision) {
    case Precision::ieee:
      return "ieee";
    case Precision::fast:
      return "fast";
    case Precision::automatic:
      return "auto";
    case Precision::tf32:
      return "tf32";
  }
  return "unknown precision";
}

std::string_view to_string(ScaleKind kind) {
  switch (kind) {
    case ScaleKind::none:
      return "none";
    case ScaleKind::tensor:
      return "tensor";
    case ScaleKind::head:
      return "head";
    case ScaleKind::token:
      return "token";
  }
  return "unknown scales";
}

std::size_t size_of(Dtype dtype) {
  if (dtype == Dtype::float32) return 4;
  return dtype == Dtype::float16 || dtype == Dtype::bfloat16 ? 2 : 1;
}

double flops(const Problem& p, Pass pass) {
  const double dims = static_cast<double>(p.head_dim + (p.head_dim_v ? p.head_dim_v : p.head_dim));
  const double forward = 2 * dims * static_cast<double>(p.batch * p.heads_q) * visible_scores(p);
  switch (pass) {
    case Pass::backward:
    case Pass::standard_backward:
      return 2.5 * forward;
    case Pass::tangent:
      return 3 * forward;  // six products instead of two
    case Pass::second:
      return 8 * forward;  // sixteen
    default:
      return forward;
  }
}

}  // namespace flash_attention
