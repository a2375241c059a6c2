#include "api/c/structs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

#include "api/checks/refuse.h"
#include "api/option_table.h"

namespace flash_attention::api {
namespace {

void set_defaults(flash_attention_problem* problem) {
  *problem = {};
  const Problem defaults;
  const flash_attention_strides dense{Strides::dense, Strides::dense, Strides::dense};
  for (flash_attention_strides* s :
       {&problem->q_strides, &problem->k_strides, &problem->v_strides, &problem->out_strides, &problem->dout_strides,
        &problem->dq_strides, &problem->dk_strides, &problem->dv_strides, &problem->k_scale_strides,
        &problem->v_scale_strides, &problem->q_scale_strides, &problem->k_group_strides, &problem->v_group_strides}) {
    *s = dense;
  }
  problem->batch = defaults.batch, problem->heads_q = defaults.heads_q, problem->heads_kv = defaults.heads_kv;
  problem->window_left = defaults.window_left, problem->window_right = defaults.window_right;
  problem->scale = std::numeric_limits<float>::quiet_NaN();
  problem->kv_dtype = problem->q_dtype = -1;
  problem->precision = static_cast<int32_t>(defaults.precision);
  problem->key_list_heads = defaults.key_list.heads;
  problem->key_list_block_q = defaults.key_list.block_q, problem->key_list_block_kv = defaults.key_list.block_kv;
}

void set_defaults(flash_attention_buffers* buffers) { *buffers = {}; }

void set_defaults(flash_attention_options* options) { *options = {}; }

void set_defaults(flash_attention_append_problem* problem) {
  *problem = {};
  const flash_attention_strides dense{Strides::dense, Strides::dense, Strides::dense};
  for (flash_attention_strides* s :
       {&problem->q_strides, &problem->q_out_strides, &problem->k_strides, &problem->v_strides, &problem->k_cache_strides,
        &problem->v_cache_strides, &problem->k_scale_strides, &problem->v_scale_strides, &problem->dq_out_strides,
        &problem->dk_out_strides, &problem->dq_strides, &problem->dk_strides, &problem->k_group_strides,
        &problem->v_group_strides}) {
    *s = dense;
  }
  problem->batch = problem->heads_q = problem->heads_kv = 1;
  problem->cache_dtype = -1;
  problem->norm_eps = AppendProblem{}.norm_eps;
}

void set_defaults(flash_attention_append_buffers* buffers) { *buffers = {}; }

void set_defaults(flash_attention_append_gradients* gradients) { *gradients = {}; }

template <class T>
void init(T* given, std::size_t size) {
  if (given == nullptr || size < sizeof(size_t)) return;
  T all;
  set_defaults(&all);
  std::memset(static_cast<void*>(given), 0, size);
  std::memcpy(static_cast<void*>(given), &all, std::min(size, sizeof all));
  given->size = size;
}

/// The caller's struct in this library's size. Fields that an older caller does not have keep their defaults.
template <class T>
T received(const char* argument, const T* given) {
  if (given == nullptr) refuse(argument, "null", "a pointer to an initialised struct");
  if (given->size < sizeof(size_t) || given->size > sizeof(T)) {
    refuse(std::string(argument) + "->size", std::to_string(given->size),
           "call the _init function of the struct; this library knows up to " + std::to_string(sizeof(T)));
  }
  T copy;
  set_defaults(&copy);
  std::memcpy(&copy, given, given->size);
  return copy;
}

template <class Enum>
Enum enumerator(const char* argument, int32_t value, Enum last) {
  require(value >= 0 && value <= static_cast<int32_t>(last), argument, std::int64_t{value},
          ("allowed are 0 to " + std::to_string(static_cast<int>(last))).c_str());
  return static_cast<Enum>(value);
}

Strides strides(const flash_attention_strides& s) { return {s.batch, s.seq, s.head}; }

// Reads one field of a problem from its C form, for each type of a field. A refusal names it `name`.

template <class T>
void read_field(const char*, const T& given, T& field) {
  field = given;
}

void read_field(const char*, int32_t given, bool& field) { field = given != 0; }

void read_field(const char*, float given, std::optional<float>& field) {
  if (!std::isnan(given)) field = given;
}

void read_field(const char*, const flash_attention_strides& given, Strides& field) { field = strides(given); }

void read_field(const char* name, int32_t given, Dtype& field) { field = enumerator(name, given, Dtype::bfloat16); }

void read_field(const char* name, int32_t given, std::optional<Dtype>& field) {
  if (given != -1) field = enumerator(name, given, Dtype::int4);
}

void read_field(const char* name, int32_t given, Alignment& field) { field = enumerator(name, given, Alignment::top_left); }

void read_field(const char* name, int32_t given, Precision& field) { field = enumerator(name, given, Precision::tf32); }
void read_field(const char* name, int32_t given, ScaleKind& field) { field = enumerator(name, given, ScaleKind::token); }

void read_field(const char* name, const flash_attention_score_tensor& given, ScoreTensor& field) {
  const std::string dtype = std::string(name) + ".dtype";
  field = {given.present != 0, enumerator(dtype.c_str(), given.dtype, Dtype::bfloat16), given.batch_stride,
           given.head_stride, given.q_stride};
}

void read_field(const char*, const char* given, std::string& field) {
  if (given != nullptr) field = given;
}

void read_field(const char*, const int64_t (&given)[8][4], decltype(Problem::program_sizes)& field) {
  for (std::size_t n = 0; n < field.size(); ++n) std::copy_n(given[n], field[n].size(), field[n].begin());
}

}  // namespace

void init_sized(flash_attention_problem* given, std::size_t size) { init(given, size); }
void init_sized(flash_attention_buffers* given, std::size_t size) { init(given, size); }
void init_sized(flash_attention_options* given, std::size_t size) { init(given, size); }
void init_sized(flash_attention_append_problem* given, std::size_t size) { init(given, size); }
void init_sized(flash_attention_append_buffers* given, std::size_t size) { init(given, size); }
void init_sized(flash_attention_append_gradients* given, std::size_t size) { init(given, size); }

Problem problem_of(const flash_attention_problem* given) {
  const flash_attention_problem c = received("problem", given);
  Problem p;
#define FLASH_ATTENTION_READ_same(name) read_field(#name, c.name, p.name);
#define FLASH_ATTENTION_READ_parts(name)
#define FLASH_ATTENTION_READ_call(name)
#define FLASH_ATTENTION_READ_OPTION(kind, name, default_value, argument, expected, form, scores) \
  FLASH_ATTENTION_READ_##form(name)
#define FLASH_ATTENTION_READ(name, form, scores) FLASH_ATTENTION_READ_##form(name)
  FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_READ_OPTION)
  FLASH_ATTENTION_OTHER_FIELDS(FLASH_ATTENTION_READ)
#undef FLASH_ATTENTION_READ
#undef FLASH_ATTENTION_READ_OPTION
#undef FLASH_ATTENTION_READ_call
#undef FLASH_ATTENTION_READ_parts
#undef FLASH_ATTENTION_READ_same
  p.hidden_rows = {c.hidden_bounds, c.hidden_batch_stride, c.hidden_head_stride};
  p.block_mask = {c.mask_block_q, c.mask_block_kv, c.block_mask_batch_stride, c.block_mask_head_stride,
                  c.block_mask_q_stride};
  p.key_list = {enumerator("key_list_kind", c.key_list_kind, KeyListKind::blocks),
                c.key_list_entries,
                c.key_list_heads,
                c.key_list_block_q,
                c.key_list_block_kv,
                c.key_list_counts != 0};
  p.bit_mask = {enumerator("bit_mask_kind", c.bit_mask_kind, BitMaskKind::drafts), c.bit_mask_row_bytes,
                c.bit_mask_offsets != 0};
  return p;
}

Buffers buffers_of(const flash_attention_buffers* given) {
  const flash_attention_buffers c = received("buffers", given);
  return {.q = c.q,
          .k = c.k,
          .v = c.v,
          .out = c.out,
          .lse = c.lse,
          .bias = c.bias,
          .mask = c.mask,
          .alibi_slopes = c.alibi_slopes,
          .sink = c.sink,
          .cu_seqlens_q = c.cu_seqlens_q,
          .cu_seqlens_kv = c.cu_seqlens_kv,
          .seqused_q = c.seqused_q,
          .seqused_kv = c.seqused_kv,
          .key_lengths = c.key_lengths,
          .left_padding = c.left_padding,
          .page_table = c.page_table,
          .hidden_rows = c.hidden_rows,
          .block_mask = c.block_mask,
          .program_tensors = c.program_tensors,
          .program_scalars = c.program_scalars,
          .k_scale = c.k_scale,
          .v_scale = c.v_scale,
          .q_scale = c.q_scale,
          .dout = c.dout,
          .dlse = c.dlse,
          .dq = c.dq,
          .dk = c.dk,
          .dv = c.dv,
          .dbias = c.dbias,
          .dsink = c.dsink,
          .program_gradients = c.program_gradients,
          .key_list = c.key_list,
          .key_counts = c.key_counts,
          .row_max = c.row_max,
          .max_logit = c.max_logit,
          .key_mass = c.key_mass,
          .entropy = c.entropy,
          .dkey_mass = c.dkey_mass,
          .dentropy = c.dentropy,
          .q_tangent = c.q_tangent,
          .k_tangent = c.k_tangent,
          .v_tangent = c.v_tangent,
          .bias_tangent = c.bias_tangent,
          .sink_tangent = c.sink_tangent,
          .out_tangent = c.out_tangent,
          .lse_tangent = c.lse_tangent,
          .bit_mask = c.bit_mask,
          .bit_mask_offsets = c.bit_mask_offsets,
          .sequence_windows = c.sequence_windows,
          .k_group_scale = c.k_group_scale,
          .v_group_scale = c.v_group_scale,
          .k_group_zero = c.k_group_zero,
          .v_group_zero = c.v_group_zero};
}

Options options_of(const flash_attention_options* given) {
  const flash_attention_options c = received("options", given);
  Options o;
  o.device = {enumerator("device_kind", c.device_kind, DeviceKind::emulator), c.device_index, c.emulated_arch};
  o.stream = c.stream, o.workspace = c.workspace, o.workspace_bytes = c.workspace_bytes;
  o.seed = c.seed, o.offset = c.offset;
  if (c.kernel != nullptr) o.kernel = c.kernel;
  o.prepared_mask = {c.prepared_mask, c.prepared_mask_stamp};
  if (c.tile_q != 0 || c.tile_kv != 0) o.tile = TileSize{c.tile_q, c.tile_kv};
  if (enumerator("part", c.part, FLASH_ATTENTION_PART_DQ) != FLASH_ATTENTION_PART_WHOLE) {
    const auto kind = static_cast<BackwardPart::Kind>(c.part - FLASH_ATTENTION_PART_ROWS);
    o.part = {kind, c.part_rows, c.part_first, c.part_number};
  }
  return o;
}

AppendProblem append_problem_of(const flash_attention_append_problem* given) {
  const auto c = received("problem", given);
  AppendProblem p;
  p.batch = c.batch, p.seq_new = c.seq_new, p.seq_q = c.seq_q, p.heads_q = c.heads_q, p.heads_kv = c.heads_kv;
  p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v, p.total_new = c.total_new, p.total_q = c.total_q;
  p.dtype = enumerator("dtype", c.dtype, Dtype::bfloat16);
  if (c.cache_dtype != -1) p.cache_dtype = enumerator("cache_dtype", c.cache_dtype, Dtype::int4);
  p.rotary_dtype = enumerator("rotary_dtype", c.rotary_dtype, Dtype::bfloat16);
  p.packed_new = c.packed_new != 0, p.packed_q = c.packed_q != 0, p.placed = c.placed != 0;
  p.q_strides = strides(c.q_strides), p.q_out_strides = strides(c.q_out_strides);
  p.k_strides = strides(c.k_strides), p.v_strides = strides(c.v_strides);
  p.k_cache_strides = strides(c.k_cache_strides), p.v_cache_strides = strides(c.v_cache_strides);
  p.capacity = c.capacity, p.page_size = c.page_size, p.num_pages = c.num_pages;
  p.page_table_stride = c.page_table_stride, p.rotary_dim = c.rotary_dim, p.rotary_positions = c.rotary_positions;
  p.rotary_stride = c.rotary_stride, p.rotary_interleaved = c.rotary_interleaved != 0;
  p.rotary_offsets = c.rotary_offsets != 0, p.rotary_one_query = c.rotary_one_query != 0;
  p.scales = enumerator("scales", c.scales, ScaleKind::token);
  p.k_scale_strides = strides(c.k_scale_strides), p.v_scale_strides = strides(c.v_scale_strides);
  p.q_norm = c.q_norm != 0, p.k_norm = c.k_norm != 0, p.norm_plus_one = c.norm_plus_one != 0;
  p.norm_dtype = enumerator("norm_dtype", c.norm_dtype, Dtype::bfloat16), p.norm_eps = c.norm_eps;
  p.angle_sections = c.angle_sections, p.sections_interleaved = c.sections_interleaved != 0, p.in_rows = c.in_rows != 0;
  p.dq_out_strides = strides(c.dq_out_strides), p.dk_out_strides = strides(c.dk_out_strides);
  p.dq_strides = strides(c.dq_strides), p.dk_strides = strides(c.dk_strides);
  p.cache_group = c.cache_group;
  p.k_group_strides = strides(c.k_group_strides), p.v_group_strides = strides(c.v_group_strides);
  std::copy_n(c.rotary_sections, p.rotary_sections.size(), p.rotary_sections.begin());
  return p;
}

AppendBuffers append_buffers_of(const flash_attention_append_buffers* given) {
  const auto c = received("buffers", given);
  return {.q = c.q,
          .q_out = c.q_out,
          .k = c.k,
          .v = c.v,
          .k_cache = c.k_cache,
          .v_cache = c.v_cache,
          .cos = c.cos,
          .sin = c.sin,
          .lengths = c.lengths,
          .rotary_offsets = c.rotary_offsets,
          .cu_seqlens_new = c.cu_seqlens_new,
          .cu_seqlens_q = c.cu_seqlens_q,
          .sequences = c.sequences,
          .positions = c.positions,
          .page_table = c.page_table,
          .k_scale = c.k_scale,
          .v_scale = c.v_scale,
          .q_norm_weight = c.q_norm_weight,
          .k_norm_weight = c.k_norm_weight,
          .angle_positions = c.angle_positions,
          .k_group_scale = c.k_group_scale,
          .v_group_scale = c.v_group_scale,
          .k_group_zero = c.k_group_zero,
          .v_group_zero = c.v_group_zero};
}

AppendGradients append_gradients_of(const flash_attention_append_gradients* given) {
  const auto c = received("gradients", given);
  return {.dq_out = c.dq_out,
          .dk_out = c.dk_out,
          .dq = c.dq,
          .dk = c.dk,
          .dq_norm_weight = c.dq_norm_weight,
          .dk_norm_weight = c.dk_norm_weight,
          .workspace = c.workspace};
}

Pass pass_of(int32_t pass) { return enumerator("pass", pass, Pass::second); }

}  // namespace flash_attention::api
