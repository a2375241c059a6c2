#include "flash_attention/c_api.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

#include "api/checks/refuse.h"
#include "api/guard.h"
#include "api/problem_fields.h"
#include "flash_attention/append.h"
#include "flash_attention/attention.h"
#include "flash_attention/version.h"

namespace fa = flash_attention;

namespace {

thread_local std::string last_error;

/// Runs a call and turns what it throws into a status; no exception crosses the C boundary.
template <class Call>
flash_attention_status status_of(Call&& call) noexcept {
  try {
    fa::api::guarded(call);
    return FLASH_ATTENTION_OK;
  } catch (const fa::Error& error) {
    last_error = error.what();
    return static_cast<flash_attention_status>(error.code());
  }
}

void set_defaults(flash_attention_problem* problem) {
  *problem = {};
  const fa::Problem defaults;
  const flash_attention_strides dense{fa::Strides::dense, fa::Strides::dense, fa::Strides::dense};
  for (flash_attention_strides* s :
       {&problem->q_strides, &problem->k_strides, &problem->v_strides, &problem->out_strides, &problem->dout_strides,
        &problem->dq_strides, &problem->dk_strides, &problem->dv_strides, &problem->k_scale_strides,
        &problem->v_scale_strides, &problem->q_scale_strides}) {
    *s = dense;
  }
  problem->batch = defaults.batch, problem->heads_q = defaults.heads_q, problem->heads_kv = defaults.heads_kv;
  problem->window_left = defaults.window_left, problem->window_right = defaults.window_right;
  problem->scale = std::numeric_limits<float>::quiet_NaN();
  problem->kv_dtype = problem->q_dtype = -1;
}

void set_defaults(flash_attention_buffers* buffers) { *buffers = {}; }

void set_defaults(flash_attention_options* options) { *options = {}; }

void set_defaults(flash_attention_append_problem* problem) {
  *problem = {};
  const flash_attention_strides dense{fa::Strides::dense, fa::Strides::dense, fa::Strides::dense};
  for (flash_attention_strides* s :
       {&problem->q_strides, &problem->q_out_strides, &problem->k_strides, &problem->v_strides, &problem->k_cache_strides,
        &problem->v_cache_strides, &problem->k_scale_strides, &problem->v_scale_strides}) {
    *s = dense;
  }
  problem->batch = problem->heads_q = problem->heads_kv = 1;
  problem->cache_dtype = -1;
}

void set_defaults(flash_attention_append_buffers* buffers) { *buffers = {}; }

/// A caller that was built against another header has a struct of another size: nothing is written past its end.
template <class T>
void init_sized(T* given, size_t size) {
  if (given == nullptr || size < sizeof(size_t)) return;
  T all;
  set_defaults(&all);
  std::memset(static_cast<void*>(given), 0, size);
  std::memcpy(static_cast<void*>(given), &all, std::min(size, sizeof all));
  given->size = size;
}

/// The caller's struct in this library's size: what an older caller does not have keeps its default.
template <class T>
T received(const char* argument, const T* given) {
  if (given == nullptr) fa::api::refuse(argument, "null", "a pointer to an initialised struct");
  if (given->size < sizeof(size_t) || given->size > sizeof(T)) {
    fa::api::refuse(std::string(argument) + "->size", std::to_string(given->size),
                    "call the _init function of the struct; this library knows up to " + std::to_string(sizeof(T)));
  }
  T copy;
  set_defaults(&copy);
  std::memcpy(&copy, given, given->size);
  return copy;
}

template <class Enum>
Enum enumerator(const char* argument, int32_t value, Enum last) {
  fa::api::require(value >= 0 && value <= static_cast<int32_t>(last), argument, std::int64_t{value},
                   ("allowed are 0 to " + std::to_string(static_cast<int>(last))).c_str());
  return static_cast<Enum>(value);
}

fa::Strides strides(const flash_attention_strides& s) { return {s.batch, s.seq, s.head}; }

// One field of a problem from C's form of it, for each type that a field has; `name` is what a refusal says.

template <class T>
void read_field(const char*, const T& given, T& field) {
  field = given;
}

void read_field(const char*, int32_t given, bool& field) { field = given != 0; }

void read_field(const char*, float given, std::optional<float>& field) {
  if (!std::isnan(given)) field = given;
}

void read_field(const char*, const flash_attention_strides& given, fa::Strides& field) { field = strides(given); }

void read_field(const char* name, int32_t given, fa::Dtype& field) { field = enumerator(name, given, fa::Dtype::bfloat16); }

void read_field(const char* name, int32_t given, std::optional<fa::Dtype>& field) {
  if (given != -1) field = enumerator(name, given, fa::Dtype::int8);
}

void read_field(const char* name, int32_t given, fa::Alignment& field) {
  field = enumerator(name, given, fa::Alignment::top_left);
}

void read_field(const char* name, int32_t given, fa::Precision& field) {
  field = enumerator(name, given, fa::Precision::fast);
}
void read_field(const char* name, int32_t given, fa::ScaleKind& field) {
  field = enumerator(name, given, fa::ScaleKind::token);
}

void read_field(const char* name, const flash_attention_score_tensor& given, fa::ScoreTensor& field) {
  const std::string dtype = std::string(name) + ".dtype";
  field = {given.present != 0, enumerator(dtype.c_str(), given.dtype, fa::Dtype::bfloat16), given.batch_stride,
           given.head_stride, given.q_stride};
}

void read_field(const char*, const char* given, std::string& field) {
  if (given != nullptr) field = given;
}

void read_field(const char*, const int64_t (&given)[8][4], decltype(fa::Problem::program_sizes)& field) {
  for (std::size_t n = 0; n < field.size(); ++n) std::copy_n(given[n], field[n].size(), field[n].begin());
}

fa::Problem problem_of(const flash_attention_problem* given) {
  const flash_attention_problem c = received("problem", given);
  fa::Problem p;
#define FLASH_ATTENTION_READ(name) read_field(#name, c.name, p.name);
#define FLASH_ATTENTION_SKIP(name)
  FLASH_ATTENTION_PROBLEM_FIELDS(FLASH_ATTENTION_READ, FLASH_ATTENTION_SKIP)
#undef FLASH_ATTENTION_SKIP
#undef FLASH_ATTENTION_READ
  p.hidden_rows = {c.hidden_bounds, c.hidden_batch_stride, c.hidden_head_stride};
  p.block_mask = {c.mask_block_q, c.mask_block_kv, c.block_mask_batch_stride, c.block_mask_head_stride,
                  c.block_mask_q_stride};
  return p;
}

fa::Buffers buffers_of(const flash_attention_buffers* given) {
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
          .program_gradients = c.program_gradients};
}

fa::Options options_of(const flash_attention_options* given) {
  const flash_attention_options c = received("options", given);
  fa::Options o;
  o.device = {enumerator("device_kind", c.device_kind, fa::DeviceKind::emulator), c.device_index, c.emulated_arch};
  o.stream = c.stream, o.workspace = c.workspace, o.workspace_bytes = c.workspace_bytes;
  o.seed = c.seed, o.offset = c.offset;
  if (c.kernel != nullptr) o.kernel = c.kernel;
  return o;
}

using Entry = void (*)(const fa::Problem&, const fa::Buffers&, const fa::Options&);

flash_attention_status run(Entry entry, const flash_attention_problem* problem, const flash_attention_buffers* buffers,
                           const flash_attention_options* options) noexcept {
  return status_of([&] { entry(problem_of(problem), buffers_of(buffers), options_of(options)); });
}

fa::AppendProblem append_problem_of(const flash_attention_append_problem* given) {
  const auto c = received("problem", given);
  fa::AppendProblem p;
  p.batch = c.batch, p.seq_new = c.seq_new, p.seq_q = c.seq_q, p.heads_q = c.heads_q, p.heads_kv = c.heads_kv;
  p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v, p.total_new = c.total_new, p.total_q = c.total_q;
  p.dtype = enumerator("dtype", c.dtype, fa::Dtype::bfloat16);
  if (c.cache_dtype != -1) p.cache_dtype = enumerator("cache_dtype", c.cache_dtype, fa::Dtype::int8);
  p.rotary_dtype = enumerator("rotary_dtype", c.rotary_dtype, fa::Dtype::bfloat16);
  p.packed_new = c.packed_new != 0, p.packed_q = c.packed_q != 0, p.placed = c.placed != 0;
  p.q_strides = strides(c.q_strides), p.q_out_strides = strides(c.q_out_strides);
  p.k_strides = strides(c.k_strides), p.v_strides = strides(c.v_strides);
  p.k_cache_strides = strides(c.k_cache_strides), p.v_cache_strides = strides(c.v_cache_strides);
  p.capacity = c.capacity, p.page_size = c.page_size, p.num_pages = c.num_pages;
  p.page_table_stride = c.page_table_stride, p.rotary_dim = c.rotary_dim, p.rotary_positions = c.rotary_positions;
  p.rotary_stride = c.rotary_stride, p.rotary_interleaved = c.rotary_interleaved != 0;
  p.rotary_offsets = c.rotary_offsets != 0, p.rotary_one_query = c.rotary_one_query != 0;
  p.scales = enumerator("scales", c.scales, fa::ScaleKind::token);
  p.k_scale_strides = strides(c.k_scale_strides), p.v_scale_strides = strides(c.v_scale_strides);
  return p;
}

fa::AppendBuffers append_buffers_of(const flash_attention_append_buffers* given) {
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
          .v_scale = c.v_scale};
}

fa::Pass pass_of(int32_t pass) { return enumerator("pass", pass, fa::Pass::standard_backward); }

}  // namespace

void flash_attention_problem_init_sized(flash_attention_problem* problem, size_t size) { init_sized(problem, size); }
void flash_attention_buffers_init_sized(flash_attention_buffers* buffers, size_t size) { init_sized(buffers, size); }
void flash_attention_options_init_sized(flash_attention_options* options, size_t size) { init_sized(options, size); }
void flash_attention_append_problem_init_sized(flash_attention_append_problem* problem, size_t size) {
  init_sized(problem, size);
}
void flash_attention_append_buffers_init_sized(flash_attention_append_buffers* buffers, size_t size) {
  init_sized(buffers, size);
}

flash_attention_status flash_attention_append(const flash_attention_append_problem* problem,
                                              const flash_attention_append_buffers* buffers,
                                              const flash_attention_options* options) {
  return status_of([&] { fa::append(append_problem_of(problem), append_buffers_of(buffers), options_of(options)); });
}

flash_attention_status flash_attention_forward(const flash_attention_problem* problem,
                                               const flash_attention_buffers* buffers,
                                               const flash_attention_options* options) {
  return run(fa::forward, problem, buffers, options);
}

flash_attention_status flash_attention_backward(const flash_attention_problem* problem,
                                                const flash_attention_buffers* buffers,
                                                const flash_attention_options* options) {
  return run(fa::backward, problem, buffers, options);
}

flash_attention_status flash_attention_standard_forward(const flash_attention_problem* problem,
                                                        const flash_attention_buffers* buffers,
                                                        const flash_attention_options* options) {
  return run(fa::standard_forward, problem, buffers, options);
}

flash_attention_status flash_attention_standard_backward(const flash_attention_problem* problem,
                                                         const flash_attention_buffers* buffers,
                                                         const flash_attention_options* options) {
  return run(fa::standard_backward, problem, buffers, options);
}

flash_attention_status flash_attention_workspace_bytes(const flash_attention_problem* problem, int32_t pass,
                                                       const flash_attention_options* options, size_t* bytes) {
  return status_of([&] {
    if (bytes == nullptr) fa::api::refuse("bytes", "null", "a place for the answer");
    *bytes = fa::workspace_bytes(problem_of(problem), pass_of(pass), options_of(options));
  });
}

flash_attention_status flash_attention_explain(const flash_attention_problem* problem, int32_t pass,
                                               const flash_attention_options* options, char* text, size_t capacity,
                                               size_t* needed) {
  return status_of([&] {
    if (text == nullptr && capacity > 0) fa::api::refuse("text", "null", "a buffer of `capacity` bytes");
    const std::string answer = fa::explain(problem_of(problem), pass_of(pass), options_of(options));
    if (needed != nullptr) *needed = answer.size() + 1;
    if (capacity == 0) return;
    const size_t length = std::min(answer.size(), capacity - 1);
    std::memcpy(text, answer.data(), length);
    text[length] = '\0';
  });
}

const char* flash_attention_last_error(void) { return last_error.c_str(); }

const char* flash_attention_version(void) { return FLASH_ATTENTION_VERSION; }
