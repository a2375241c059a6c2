#include "plan/arguments.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "plan/masks.h"
#include "plan/program.h"
#include "plan/views.h"
#include "program/program.h"

namespace flash_attention::plan {
namespace {

static_assert(std::tuple_size_v<decltype(Plan::workspace_offsets)> == abi::max_regions);
static_assert(static_cast<int>(abi::Type::bfloat16) == static_cast<int>(Dtype::bfloat16) &&
              static_cast<int>(abi::Type::float16) == static_cast<int>(Dtype::float16) &&
              static_cast<int>(abi::Type::e4m3) == static_cast<int>(Dtype::float8_e4m3) &&
              static_cast<int>(abi::Type::e5m2) == static_cast<int>(Dtype::float8_e5m2) &&
              static_cast<int>(abi::Type::int8) == static_cast<int>(Dtype::int8));

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
  }
  return "";
}

/// Designated initialisers; members at their default are left out, so that the unit shows what is special about it.
class Initialiser {
 public:
  explicit Initialiser(const char* type) { text_ << type << '{'; }

  void member(const char* name, bool value, bool initial) { put(name, value, initial, value ? "true" : "false"); }
  void member(const char* name, int value, int initial) { put(name, value, initial, std::to_string(value)); }
  void member(const char* name, abi::Type value, abi::Type initial) { put(name, value, initial, source(value)); }
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
  MEMBER(score_program);
  MEMBER(score_hides);
  MEMBER(mask_program);
  MEMBER(kv_dtype);
  MEMBER(kv_scales);
  MEMBER(token_scales);
  MEMBER(latent);
  MEMBER(narrow_queries);
  MEMBER(q_scales);
  return out.done();
}

abi::ScoreView view(const void* data, const ScoreTensor& tensor) {
  return {data, tensor.batch_stride, tensor.head_stride, tensor.q_stride};
}

}  // namespace

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
  MEMBER(dynamic_scheduler);
  MEMBER(page_rows);
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
  MEMBER(deterministic);
  MEMBER(separate_dq);
  MEMBER(key_sums);
  MEMBER(dlse);
  MEMBER(dbias);
  MEMBER(dsink);
  return out.done();
}

std::string to_source(const abi::AppendConfig& config) {
  const abi::AppendConfig initial;
  Initialiser out("AppendConfig");
  MEMBER(dtype);
  MEMBER(cache_dtype);
  MEMBER(rotary_dtype);
  MEMBER(vector);
  MEMBER(lanes);
  MEMBER(rotary);
  MEMBER(interleaved);
  MEMBER(paged);
  MEMBER(scales);
  MEMBER(token_scales);
  return out.done();
}

#undef MEMBER

abi::Features features_of(const Problem& p) {
  const program::Program program = p.program.empty() ? program::Program{} : program::parse(p.program);
  return {.dtype = static_cast<abi::Type>(p.dtype),
          .bias_dtype = p.bias.present ? static_cast<abi::Type>(p.bias.dtype) : abi::Type::float32,
          .packed = p.packed,
          .seqused_q = p.seqused_q,
          .seqused_kv = p.seqused_kv,
          .key_lengths = p.key_lengths,
          .left_padding = p.left_padding,
          .paged = p.page_size != 0,
          .window_left = p.window_left >= 0,
          .window_right = p.window_right >= 0,
          .top_left = p.alignment == Alignment::top_left && (p.window_left >= 0 || p.window_right >= 0),
          .softcap = p.softcap > 0,
          .bias = p.bias.present,
          .alibi = p.alibi,
          .mask = p.mask.present,
          .dropout = p.dropout_p > 0,
          .sink = p.sink,
          .hidden_bounds = p.hidden_rows.bounds,
          .block_mask = p.block_mask.block_q != 0,
          .score_program = program.score >= 0,
          .score_hides = program.score >= 0 && program_traits(p).hides,
          .mask_program = program.visible >= 0,
          .kv_dtype = *p.kv_dtype == p.dtype ? abi::Type::float32 : static_cast<abi::Type>(*p.kv_dtype),
          .kv_scales = p.kv_scales != ScaleKind::none,
          .token_scales = p.kv_scales == ScaleKind::token,
          .latent = p.latent,
          .narrow_queries = *p.q_dtype != p.dtype,
          .q_scales = p.q_scales != ScaleKind::none};
}

abi::Features features_with_map(const Problem& p) {
  abi::Features features = features_of(p);
  features.mask_map = p.mask.present;
  return features;
}

abi::AttentionArgs make_arguments(const Problem& p, const Plan& plan, const Buffers& b, const Options& options) {
  abi::AttentionArgs args{};
  args.Q = view(b.q, p.q_strides);
  args.K = view(b.k, p.k_strides);
  args.V = view(b.v, p.v_strides);
  args.O = view(b.out, p.out_strides);
  args.dO = view(b.dout, p.dout_strides);
  args.dQ = view(b.dq, p.dq_strides);
  args.dK = view(b.dk, p.dk_strides);
  args.dV = view(b.dv, p.dv_strides);
  args.lse = b.lse;
  args.dlse = b.dlse;
  args.cu_seqlens_q = b.cu_seqlens_q;
  args.cu_seqlens_kv = b.cu_seqlens_kv;
  args.seqused_q = b.seqused_q;
  args.seqused_kv = b.seqused_kv;
  args.key_lengths = b.key_lengths;
  args.left_padding = b.left_padding;
  args.page_table = b.page_table;
  args.page_table_stride = p.page_table_stride;
  args.page_size = static_cast<int>(p.page_size);
  args.num_pages = static_cast<int>(p.num_pages);
  args.bias = view(b.bias, p.bias);
  args.mask = view(b.mask, p.mask);
  args.hidden_rows = b.hidden_rows;
  args.hidden_batch_stride = p.hidden_rows.batch_stride;
  args.hidden_head_stride = p.hidden_rows.head_stride;
  args.block_mask = {b.block_mask, p.block_mask.batch_stride, p.block_mask.head_stride, p.block_mask.q_stride};
  args.mask_block_q = static_cast<int>(p.block_mask.block_q);
  args.mask_block_kv = static_cast<int>(p.block_mask.block_kv);
  args.map_heads = static_cast<int>(map_heads(p));
  args.map_batches = static_cast<int>(map_batches(p));
  args.alibi_slopes = b.alibi_slopes;
  args.alibi_batch_stride = p.alibi_batch_stride;
  args.sink = b.sink;
  args.K_scale = scale_view(b.k_scale, p.k_scale_strides);
  args.V_scale = scale_view(b.v_scale, p.v_scale_strides);
  args.Q_scale = scale_view(b.q_scale, p.q_scale_strides);

  // dbias is dense over the axes that bias does not broadcast.
  args.dbias = b.dbias;
  const long long rows = p.bias.q_stride != 0 ? p.seq_q : 1;
  const long long heads = p.bias.head_stride != 0 ? p.heads_q : 1;
  args.dbias_q_stride = p.bias.q_stride != 0 ? p.seq_kv : 0;
  args.dbias_head_stride = p.bias.head_stride != 0 ? rows * p.seq_kv : 0;
  args.dbias_batch_stride = p.bias.batch_stride != 0 ? heads * rows * p.seq_kv : 0;
  args.dsink = b.dsink;

  args.program = program_arguments(p, plan, b, options);
  args.repairs = options.repairs;
  args.workspace = options.workspace;
  for (std::size_t i = 0; i < plan.workspace_offsets.size(); ++i) args.workspace_offsets[i] = plan.workspace_offsets[i];

  args.batch = static_cast<int>(p.batch);
  args.seq_q = static_cast<int>(p.seq_q);
  args.seq_kv = static_cast<int>(p.seq_kv);
  args.heads_q = static_cast<int>(p.heads_q);
  args.heads_kv = static_cast<int>(p.heads_kv);
  args.group = static_cast<int>(p.heads_q / p.heads_kv);
  args.total_q = static_cast<int>(p.total_q);
  args.total_kv = static_cast<int>(p.total_kv);
  args.num_splits = plan.num_splits;
  constexpr std::int64_t far = std::numeric_limits<int>::max() / 2;
  args.window_left = static_cast<int>(std::min(p.window_left, far));
  args.window_right = static_cast<int>(std::min(p.window_right, far));
  args.scale = *p.scale;
  args.softcap = p.softcap;
  args.seed = options.seed;
  args.offset = options.offset;
  args.drop_threshold = static_cast<unsigned>(std::floor(static_cast<double>(p.dropout_p) * 0x1p32));
  args.keep_scale = 1.0f / (1.0f - p.dropout_p);
  return args;
}

}  // namespace flash_attention::plan
