// _core.append: new rows of a cache, and the rotary embedding.
#include "flash_attention/append.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "checks.h"
#include "gil.h"

namespace flash_attention::python {
namespace {

enum AppendSlot {
  k_cache,
  v_cache,
  k,
  v,
  q,
  q_out,
  cos,
  sin,
  lengths,
  rotary_offsets,
  cu_seqlens_new,
  cu_seqlens_q,
  sequences,
  positions,
  page_table,
  k_scale,
  v_scale,
  q_norm,
  k_norm,
  angle_positions,
  k_zero,
  v_zero,
  k_global_scale,
  v_global_scale,
  num_append_slots
};
constexpr std::array<const char*, num_append_slots> append_names = {
    "k_cache",        "v_cache",      "k",         "v",         "q",
    "q_out",          "cos",          "sin",       "lengths",   "rotary_offsets",
    "cu_seqlens_new", "cu_seqlens_q", "sequences", "positions", "page_table",
    "k_scale",        "v_scale",      "q_norm",    "k_norm",    "angle_positions",
    "k_zero",         "v_zero",       "k_global_scale", "v_global_scale"};
using AppendSlots = std::array<Tensor, num_append_slots>;

/// The numbers of a call, as Python passes them.
struct AppendScalars {
  explicit AppendScalars(const nb::tuple& given)
      : interleaved(nb::cast<bool>(given[0])),
        one_query(nb::cast<bool>(given[1])),
        codes(nb::cast<std::string>(given[2])),
        q_norm(nb::cast<bool>(given[3])),
        k_norm(nb::cast<bool>(given[4])),
        plus_one(nb::cast<bool>(given[5])),
        eps(nb::cast<float>(given[6])),
        sections(nb::cast<std::vector<std::int64_t>>(given[7])),
        sections_interleaved(nb::cast<bool>(given[8])) {}

  bool interleaved, one_query;
  std::string codes;
  bool q_norm, k_norm, plus_one;
  float eps;
  std::vector<std::int64_t> sections;
  bool sections_interleaved;
};

class AppendCall {
 public:
  /// in_rows: k is written to k_cache row by row, and there is no v.
  AppendCall(const AppendSlots& tensors, const AppendScalars& scalars, bool in_rows) : t_(tensors) {
    const Tensor& cache = t_[k_cache];
    problem.in_rows = in_rows;
    options.device = cache.device;
    for (const Tensor& tensor : t_) {
      if (tensor.present() && !(tensor.device == options.device)) {
        refuse_value(tensor.name, "is on " + to_string(tensor.device) + "; {k_cache} is on " + to_string(options.device) +
                                      ", and all must be on one device");
      }
    }
    if (in_rows) {
      problem.heads_kv = t_[k].sizes[t_[k].rank - 2], problem.head_dim = t_[k].sizes[t_[k].rank - 1];
    } else {
      read_caches(scalars.codes);
    }
    problem.placed = t_[sequences].present();
    if (t_[positions].present() != problem.placed)
      refuse(t_[problem.placed ? sequences : positions], "sequences and positions go together");
    problem.packed_new = t_[cu_seqlens_new].present();
    problem.packed_q = t_[cu_seqlens_q].present();
    read_batch();
    read_rows();
    read_rotary(scalars.interleaved, scalars.one_query);
    read_places();
    read_norms(scalars);
    read_angles(scalars);
    if (!in_rows && has_groups(*problem.cache_dtype)) {
      read_groups();
    } else {
      read_scales();
    }
  }

  AppendProblem problem;
  AppendBuffers buffers;
  Options options;

 private:
  void read_caches(const std::string& codes) {
    const Tensor &keys = t_[k_cache], &values = t_[v_cache];
    for (const Tensor* cache : {&keys, &values}) {
      if (cache->rank != 4) refuse(*cache, "expected 4 axes, [batch or pages, rows, heads, head_dim]");
      if (cache->sizes[0] != keys.sizes[0] || cache->sizes[1] != keys.sizes[1] || cache->sizes[2] != keys.sizes[2])
        refuse(*cache, "expected the pages, rows and heads of k_cache, " + keys.describe());
      if (cache->sizes[3] == 0) refuse(*cache, "expected a head_dim of 1 and up");
      need_unit_last_stride(*cache);
    }
    problem.cache_dtype = cache_dtype_of(keys, codes);
    if (cache_dtype_of(values, codes) != *problem.cache_dtype) refuse_dtype(values, "the dtype of k_cache");
    problem.heads_kv = keys.sizes[2];
    problem.head_dim = columns_of(*problem.cache_dtype, keys.sizes[3]);
    problem.head_dim_v = columns_of(*problem.cache_dtype, values.sizes[3]);
    problem.capacity = keys.sizes[1];
    if (!keys.empty()) problem.k_cache_strides = {keys.strides[0], keys.strides[1], keys.strides[2]};
    if (!values.empty()) problem.v_cache_strides = {values.strides[0], values.strides[1], values.strides[2]};
    buffers.k_cache = keys.data;
    buffers.v_cache = values.data;
  }

  /// The number of sequences: from the starts of sequences, else the table, else the rows, else the cache.
  void read_batch() {
    const Tensor& table = t_[page_table];
    if (table.present()) {
      if (!table.is_dtype(nb::dlpack::dtype_code::Int, 32)) refuse_dtype(table, "dtype int32");
      if (table.rank != 2) refuse(table, "expected [batch, pages]");
      need_unit_last_stride(table);
      problem.batch = table.sizes[0];
      problem.num_pages = t_[k_cache].sizes[0];
      problem.page_size = t_[k_cache].sizes[1];
      problem.page_table_stride = table.sizes[0] > 1 ? table.strides[0] : table.sizes[1];
      problem.capacity = table.sizes[1] * problem.page_size;
      buffers.page_table = static_cast<const std::int32_t*>(table.data);
    } else if (problem.packed_new || problem.packed_q) {
      const Tensor& starts = t_[problem.packed_new ? cu_seqlens_new : cu_seqlens_q];
      if (starts.rank != 1 || starts.sizes[0] < 1) refuse(starts, "expected int32[batch + 1]");
      problem.batch = starts.sizes[0] - 1;
    } else if (problem.placed) {
      problem.batch = t_[k_cache].sizes[0];
    } else {
      problem.batch = t_[t_[k].present() ? k : t_[q].present() ? q : k_cache].sizes[0];
    }
    if (!table.present() && !problem.in_rows && t_[k_cache].sizes[0] < problem.batch)
      refuse(t_[k_cache], "there are " + std::to_string(problem.batch) + " sequences");
  }

  /// Strides of [batch, rows, heads, dim], or of [total, heads, dim] if rows are packed end to end.
  Strides read(const Tensor& tensor, bool end_to_end, std::int64_t& rows, std::int64_t heads, std::int64_t dim) {
    const int first = end_to_end ? 0 : 1;
    if (tensor.rank != 3 + first)
      refuse(tensor, end_to_end ? "expected [total, heads, head_dim]" : "expected [batch, seq, heads, head_dim]");
    if (rows < 0) rows = tensor.sizes[first];
    const bool fits = tensor.sizes[first] == rows && tensor.sizes[first + 1] == heads && tensor.sizes[first + 2] == dim &&
                      (end_to_end || tensor.sizes[0] == problem.batch);
    if (!fits) {
      refuse(tensor, "expected " + (end_to_end ? axes({rows, heads, dim}) : axes({problem.batch, rows, heads, dim})));
    }
    need_unit_last_stride(tensor);
    if (dtype_of(tensor) != problem.dtype)
      refuse_dtype(tensor, "the dtype of " + std::string(t_[t_[k].present() ? k : q].name));
    if (tensor.empty()) return {};
    return {end_to_end ? 0 : tensor.strides[0], tensor.strides[first], tensor.strides[first + 1]};
  }

  void read_rows() {
    if (!problem.in_rows && t_[k].present() != t_[v].present()) refuse(t_[t_[k].present() ? k : v], "k and v go together");
    if (!t_[k].present() && !t_[q].present()) refuse_value("k", "got None; {k} and {v}, or {q}, must be given");
    problem.dtype = dtype_of(t_[t_[k].present() ? k : q]);
    if (t_[k].present()) {
      const bool end_to_end = problem.packed_new || problem.placed;
      std::int64_t rows = -1;
      problem.k_strides = read(t_[k], end_to_end, rows, problem.heads_kv, problem.head_dim);
      (end_to_end ? problem.total_new : problem.seq_new) = rows;
      buffers.k = t_[k].data;
      if (problem.in_rows) {
        problem.k_cache_strides = read(t_[k_cache], end_to_end, rows, problem.heads_kv, problem.head_dim);
        buffers.k_cache = t_[k_cache].data;
      } else {
        problem.v_strides = read(t_[v], end_to_end, rows, problem.heads_kv, problem.head_dim_v);
        buffers.v = t_[v].data;
      }
    }
    if (t_[q].present()) {
      const bool end_to_end = problem.packed_q || problem.placed;
      const int heads_axis = end_to_end ? 1 : 2;
      problem.heads_q = t_[q].rank > heads_axis ? t_[q].sizes[heads_axis] : 1;
      std::int64_t rows = -1;
      problem.q_strides = read(t_[q], end_to_end, rows, problem.heads_q, problem.head_dim);
      problem.q_out_strides = read(t_[q_out], end_to_end, rows, problem.heads_q, problem.head_dim);
      (end_to_end ? problem.total_q : problem.seq_q) = rows;
      buffers.q = t_[q].data;
      buffers.q_out = t_[q_out].data;
    }
  }

  void read_rotary(bool interleaved, bool one_query) {
    const Tensor &c = t_[cos], &s = t_[sin];
    if (c.present() != s.present()) refuse(c.present() ? c : s, "cos and sin go together");
    if (!c.present()) return;
    if (c.rank != 2) refuse(c, "expected [positions, rotary_dim / 2]");
    if (s.rank != 2 || s.sizes[0] != c.sizes[0] || s.sizes[1] != c.sizes[1] || s.strides[0] != c.strides[0])
      refuse(s, "expected the shape and strides of cos, " + c.describe());
    need_unit_last_stride(c);
    need_unit_last_stride(s);
    problem.rotary_dtype = dtype_of(c);
    if (dtype_of(s) != problem.rotary_dtype) refuse_dtype(s, "the dtype of cos, " + c.describe());
    problem.rotary_dim = 2 * c.sizes[1];
    if (problem.rotary_dim < 2 || problem.rotary_dim > problem.head_dim)
      refuse(c, "expected [positions, 1 to " + std::to_string(problem.head_dim / 2) + "]: half of the rotated dimensions");
    problem.rotary_positions = c.sizes[0];
    problem.rotary_stride = c.sizes[0] > 1 ? c.strides[0] : 0;
    problem.rotary_interleaved = interleaved;
    problem.rotary_one_query = one_query;
    buffers.cos = c.data;
    buffers.sin = s.data;
  }

  const std::int32_t* list(const Tensor& tensor, std::int64_t count) {
    if (!tensor.present()) return nullptr;
    if (!tensor.is_dtype(nb::dlpack::dtype_code::Int, 32)) refuse_dtype(tensor, "dtype int32");
    if (tensor.rank != 1 || tensor.sizes[0] != count) refuse(tensor, "expected " + axes({count}));
    need_unit_last_stride(tensor);
    return static_cast<const std::int32_t*>(tensor.data);
  }

  void read_places() {
    buffers.lengths = list(t_[lengths], problem.batch);
    buffers.rotary_offsets = list(t_[rotary_offsets], problem.batch);
    problem.rotary_offsets = t_[rotary_offsets].present();
    buffers.cu_seqlens_new = list(t_[cu_seqlens_new], problem.batch + 1);
    buffers.cu_seqlens_q = list(t_[cu_seqlens_q], problem.batch + 1);
    const std::int64_t tokens = t_[k].present() ? problem.total_new : problem.total_q;
    buffers.sequences = list(t_[sequences], tokens);
    buffers.positions = list(t_[positions], tokens);
  }

  const void* read_weight(const Tensor& weight) {
    if (!weight.present()) return nullptr;
    if (weight.rank != 1 || weight.sizes[0] != problem.head_dim) refuse(weight, "expected " + axes({problem.head_dim}));
    need_unit_last_stride(weight);
    problem.norm_dtype = dtype_of(weight);
    return weight.data;
  }

  void read_norms(const AppendScalars& scalars) {
    problem.q_norm = scalars.q_norm, problem.k_norm = scalars.k_norm;
    problem.norm_plus_one = scalars.plus_one, problem.norm_eps = scalars.eps;
    buffers.k_norm_weight = read_weight(t_[k_norm]);
    const Dtype of_k = problem.norm_dtype;
    buffers.q_norm_weight = read_weight(t_[q_norm]);
    if (t_[k_norm].present() && t_[q_norm].present() && of_k != problem.norm_dtype)
      refuse_dtype(t_[k_norm], "the dtype of q_norm, " + t_[q_norm].describe());
  }

  void read_angles(const AppendScalars& scalars) {
    const Tensor& given = t_[angle_positions];
    if (scalars.sections.size() > problem.rotary_sections.size() || scalars.sections.size() == 1)
      refuse_value("sections", "got " + std::to_string(scalars.sections.size()) + "; expected 2 to 4 numbers of pairs");
    if (!given.present()) {
      if (!scalars.sections.empty()) refuse_value("sections", "expected {angle_positions}, a row for each section");
      return;
    }
    std::copy(scalars.sections.begin(), scalars.sections.end(), problem.rotary_sections.begin());
    problem.angle_sections = static_cast<std::int64_t>(std::max<std::size_t>(scalars.sections.size(), 1));
    problem.sections_interleaved = scalars.sections_interleaved;
    if (!given.is_dtype(nb::dlpack::dtype_code::Int, 32)) refuse_dtype(given, "dtype int32");
    const bool of_k = t_[k].present();
    const bool end_to_end = problem.placed || (of_k ? problem.packed_new : problem.packed_q);
    std::vector<std::int64_t> want;
    if (problem.angle_sections > 1) want.push_back(problem.angle_sections);
    if (!end_to_end) want.push_back(problem.batch);
    want.push_back(end_to_end ? (of_k ? problem.total_new : problem.total_q) : (of_k ? problem.seq_new : problem.seq_q));
    bool fits = given.rank == static_cast<int>(want.size());
    std::int64_t stride = 1;
    for (int axis = given.rank - 1; fits && axis >= 0; --axis) {
      fits = given.sizes[axis] == want[axis] && (given.sizes[axis] <= 1 || given.strides[axis] == stride);
      stride *= given.sizes[axis];
    }
    if (!fits) {
      std::string shape;
      for (const std::int64_t size : want) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
      refuse(given, "expected a contiguous [" + shape + "]");
    }
    buffers.angle_positions = static_cast<const std::int32_t*>(given.data);
  }

  void read_scales() {
    for (const AppendSlot slot : {k_zero, v_zero, k_global_scale, v_global_scale}) {
      if (t_[slot].present()) refuse(t_[slot], "it belongs to caches of 4 bits");
    }
    problem.k_scale_strides = read_scale(t_[k_scale], buffers.k_scale);
    problem.v_scale_strides = read_scale(t_[v_scale], buffers.v_scale);
    if (t_[k_scale].present() != t_[v_scale].present())
      refuse(t_[t_[k_scale].present() ? k_scale : v_scale], "k_scale and v_scale go together");
  }

  /// Scales and zeros of groups, as the rows of the caches.
  void read_groups() {
    read_groups_of(t_[k_cache], problem.head_dim, k_scale, k_zero, problem.k_group_strides, buffers.k_group_scale,
                   buffers.k_group_zero);
    read_groups_of(t_[v_cache], problem.head_dim_v, v_scale, v_zero, problem.v_group_strides, buffers.v_group_scale,
                   buffers.v_group_zero);
    if (t_[k_global_scale].present() != t_[v_global_scale].present())
      refuse(t_[t_[k_global_scale].present() ? k_global_scale : v_global_scale],
             "k_global_scale and v_global_scale go together");
    read_scale(t_[k_global_scale], buffers.k_scale);
    read_scale(t_[v_global_scale], buffers.v_scale);
  }

  void read_groups_of(const Tensor& cache, std::int64_t columns, AppendSlot scale_slot, AppendSlot zero_slot,
                      Strides& strides, void*& scales, void*& zeros) {
    const bool has_zeros = *problem.cache_dtype == Dtype::int4;
    for (const AppendSlot slot : {scale_slot, zero_slot}) {
      const Tensor& numbers = t_[slot];
      const bool is_zero = slot == zero_slot;
      if (numbers.present() != (!is_zero || has_zeros)) {
        refuse_value(append_names[slot], numbers.present() ? "it belongs to int4"
                                         : is_zero         ? "a cache of int4 has zeros of groups"
                                                           : "a cache of 4 bits has scales of groups");
      }
      if (!numbers.present()) continue;
      need_group_dtype(numbers, *problem.cache_dtype, problem.dtype);
      bool fits = numbers.rank == 4 && numbers.sizes[3] > 0 && columns % numbers.sizes[3] == 0;
      for (int axis = 0; fits && axis < 3; ++axis) fits = numbers.sizes[axis] == cache.sizes[axis];
      if (!fits)
        refuse(numbers, "expected the shape of " + cache.describe() + " with a number for each group of columns last");
      need_unit_last_stride(numbers);
      const std::int64_t group = columns / numbers.sizes[3];
      if (problem.cache_group != 0 && problem.cache_group != group)
        refuse(numbers, "expected groups of " + std::to_string(problem.cache_group) + " columns, as those of k_scale");
      problem.cache_group = group;
      const Strides own = numbers.empty() ? Strides{} : Strides{numbers.strides[0], numbers.strides[1], numbers.strides[2]};
      if (is_zero && !(own == strides)) refuse(numbers, "expected the strides of its scales");
      strides = own;
      (is_zero ? zeros : scales) = numbers.data;
    }
  }

  /// Scales: one for all, [batch, heads] or [batch or pages, rows, heads].
  Strides read_scale(const Tensor& scale, float*& data) {
    if (!scale.present()) return {};
    need_float32(scale);
    const Tensor& cache = t_[k_cache];
    ScaleKind kind = ScaleKind::tensor;
    Strides strides;
    if (scale.rank == 2 && scale.sizes[0] == problem.batch && scale.sizes[1] == problem.heads_kv) {
      kind = ScaleKind::head;
      strides = {scale.strides[0], 0, scale.strides[1]};
    } else if (scale.rank == 3 && scale.sizes[0] == cache.sizes[0] && scale.sizes[1] == cache.sizes[1] &&
               scale.sizes[2] == problem.heads_kv) {
      kind = ScaleKind::token;
      strides = {scale.strides[0], scale.strides[1], scale.strides[2]};
    } else if (scale.rank > 1 || (scale.rank == 1 && scale.sizes[0] != 1)) {
      refuse(scale, "expected one number, " + axes({problem.batch, problem.heads_kv}) + " or " +
                        axes({cache.sizes[0], cache.sizes[1], problem.heads_kv}));
    }
    if (problem.scales != ScaleKind::none && problem.scales != kind)
      refuse(scale, "expected scales as those of k_scale, of " + std::string(to_string(problem.scales)));
    problem.scales = kind;
    data = static_cast<float*>(scale.data);
    return scale.empty() ? Strides{} : strides;
  }

  const AppendSlots& t_;
};

AppendSlots append_slots(const nb::tuple& tensors) {
  AppendSlots slots;
  for (int slot = 0; slot < num_append_slots && slot < static_cast<int>(tensors.size()); ++slot) {
    const bool writable = slot == k_cache || slot == v_cache || slot == q_out;
    slots[slot] = optional_tensor(tensors[slot], append_names[slot], writable);
  }
  return slots;
}

void set_stream(AppendCall& call, nb::handle tensor, std::uintptr_t stream) {
  call.options.stream = current_stream(tensor, call.options.device);
  if (call.options.stream == nullptr) call.options.stream = reinterpret_cast<void*>(stream);
}

void run_append(nb::tuple tensors, nb::tuple scalars, std::uintptr_t stream) {
  const AppendSlots slots = append_slots(tensors);
  if (!slots[k_cache].present() || !slots[v_cache].present()) refuse_type("k_cache, v_cache", "expected tensors, got None");
  AppendCall call(slots, AppendScalars(scalars), false);
  set_stream(call, tensors[0], stream);
  GilRelease released;
  append(call.problem, call.buffers, call.options);
}

/// prepare_qk: q to q_out, k to k_out, which is in the place of k_cache.
AppendCall prepare_call(const AppendSlots& slots, const AppendScalars& scalars) {
  for (const AppendSlot needed : {q, k}) {
    const bool packed = slots[cu_seqlens_new].present();
    if (slots[needed].rank != (packed ? 3 : 4))
      refuse(slots[needed], packed ? "expected [total, heads, head_dim]" : "expected [batch, seq, heads, head_dim]");
  }
  return AppendCall(slots, scalars, true);
}

void run_prepare(nb::tuple tensors, nb::tuple scalars, std::uintptr_t stream) {
  const AppendSlots slots = append_slots(tensors);
  AppendCall call = prepare_call(slots, AppendScalars(scalars));
  set_stream(call, tensors[static_cast<int>(k)], stream);
  GilRelease released;
  append(call.problem, call.buffers, call.options);
}

/// `gradients`: dq_out, dk_out, dq, dk, and float32 dq_norm and dk_norm or None. workspace(bytes) is a tensor.
void run_prepare_backward(nb::tuple tensors, nb::tuple scalars, nb::tuple gradients, nb::object workspace,
                          std::uintptr_t stream) {
  const AppendSlots slots = append_slots(tensors);
  AppendCall call = prepare_call(slots, AppendScalars(scalars));
  set_stream(call, tensors[static_cast<int>(k)], stream);
  constexpr std::array<const char*, 6> names = {"dq_out", "dk_out", "dq", "dk", "dq_norm", "dk_norm"};
  std::array<Tensor, 6> of;
  for (int i = 0; i < 6; ++i) of[i] = optional_tensor(gradients[i], names[i], i >= 2);
  const auto strides = [](const Tensor& t) {
    return t.empty() ? Strides{} : Strides{t.rank == 4 ? t.strides[0] : 0, t.strides[t.rank - 3], t.strides[t.rank - 2]};
  };
  call.problem.dq_out_strides = strides(of[0]), call.problem.dk_out_strides = strides(of[1]);
  call.problem.dq_strides = strides(of[2]), call.problem.dk_strides = strides(of[3]);
  AppendGradients made{.dq_out = of[0].data, .dk_out = of[1].data, .dq = of[2].data, .dk = of[3].data};
  made.dq_norm_weight = static_cast<float*>(of[4].data), made.dk_norm_weight = static_cast<float*>(of[5].data);
  const nb::object memory = workspace(append_backward_workspace(call.problem));
  const Tensor bytes = optional_tensor(memory, "workspace", true);
  made.workspace = bytes.data;
  GilRelease released;
  append_backward(call.problem, call.buffers, made, call.options);
}

}  // namespace

void add_append(nb::module_& module) {
  using namespace nb::literals;
  module.def("append", run_append, "tensors"_a, "scalars"_a, "stream"_a);
  module.def("prepare", run_prepare, "tensors"_a, "scalars"_a, "stream"_a);
  module.def("prepare_backward", run_prepare_backward, "tensors"_a, "scalars"_a, "gradients"_a, "workspace"_a, "stream"_a);
}

}  // namespace flash_attention::python
