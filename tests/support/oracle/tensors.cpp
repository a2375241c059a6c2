#include "support/oracle/tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

constexpr std::uint32_t fill32 = 0x7fc0dead;  // NaNs with a mark of our own
constexpr std::uint16_t fill16 = 0x7fde;

/// NaN, where a type has one; scales of mxfp4 are bytes of that type.
int nan_code(Dtype dtype) { return dtype == Dtype::mxfp4 ? 0xff : 0x7f; }

void store(std::vector<std::byte>& bytes, Dtype dtype, std::int64_t index, double value) {
  if (dtype == Dtype::float32) {
    const float x = static_cast<float>(value);
    std::memcpy(&bytes[index * 4], &x, 4);
  } else if (size_of(dtype) == 1) {  // a code
    bytes[index] = static_cast<std::byte>(std::isnan(value) ? nan_code(dtype) : static_cast<int>(value));
  } else {
    const std::uint16_t x = dtype == Dtype::float16 ? to_float16(value) : to_bfloat16(value);
    std::memcpy(&bytes[index * 2], &x, 2);
  }
}

double load(const std::vector<std::byte>& bytes, Dtype dtype, std::int64_t index) {
  if (dtype == Dtype::float32) {
    float x;
    std::memcpy(&x, &bytes[index * 4], 4);
    return x;
  }
  std::uint16_t x;
  std::memcpy(&x, &bytes[index * 2], 2);
  return dtype == Dtype::float16 ? from_float16(x) : from_bfloat16(x);
}

bool is_fill(const std::vector<std::byte>& bytes, Dtype dtype, std::int64_t index) {
  if (dtype == Dtype::float32) {
    std::uint32_t x;
    std::memcpy(&x, &bytes[index * 4], 4);
    return x == fill32;
  }
  std::uint16_t x;
  std::memcpy(&x, &bytes[index * 2], 2);
  return x == fill16;
}

std::vector<std::byte> filled(Dtype dtype, std::int64_t elements) {
  std::vector<std::byte> bytes(elements * size_of(dtype));
  for (std::int64_t x = 0; x < elements; ++x) {
    if (dtype == Dtype::float32)
      std::memcpy(&bytes[x * 4], &fill32, 4);
    else if (size_of(dtype) == 1)
      bytes[x] = static_cast<std::byte>(nan_code(dtype));
    else
      std::memcpy(&bytes[x * 2], &fill16, 2);
  }
  return bytes;
}

/// Calls visit(logical index, memory offset) for every element. The last stride is 1.
template <class Visit>
void each_element(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides, const Visit& visit) {
  std::int64_t rows = 1;
  for (std::size_t axis = 0; axis + 1 < sizes.size(); ++axis) rows *= sizes[axis];
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t rest = row, offset = 0;
    for (std::size_t axis = sizes.size() - 1; axis-- > 0;) {
      offset += rest % sizes[axis] * strides[axis];
      rest /= sizes[axis];
    }
    for (std::int64_t x = 0; x < sizes.back(); ++x) visit(row * sizes.back() + x, offset + x);
  }
}

/// Of rows of `width`.
std::vector<double> last_columns(const std::vector<double>& rows, std::int64_t width, std::int64_t count) {
  std::vector<double> columns;
  for (std::size_t row = 0; row < rows.size(); row += static_cast<std::size_t>(width)) {
    columns.insert(columns.end(), rows.begin() + static_cast<std::ptrdiff_t>(row) + width - count,
                   rows.begin() + static_cast<std::ptrdiff_t>(row) + width);
  }
  return columns;
}

}  // namespace

void* Tensors::place(Tensor t, const std::vector<double>* values, const void** slot) {
  std::int64_t low = 0, high = 0;
  bool empty = false;
  for (std::size_t axis = 0; axis < t.sizes.size(); ++axis) {
    empty |= t.sizes[axis] == 0;
    const std::int64_t reach = (t.sizes[axis] - 1) * t.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  // The first element keeps a 16-byte alignment under negative strides too.
  const auto aligned = static_cast<std::int64_t>(16 / size_of(t.dtype));
  t.first = (-low + aligned - 1) / aligned * aligned;
  t.elements = empty ? 0 : t.first + high + 1;
  t.base = memory_.allocate(t.elements * size_of(t.dtype));
  std::vector<std::byte> bytes = filled(t.dtype, t.elements);
  if (values && !empty)
    each_element(t.sizes, t.strides, [&](std::int64_t index, std::int64_t offset) {
      store(bytes, t.dtype, t.first + offset, (*values)[index]);
    });
  memory_.write(t.base, bytes.data(), bytes.size());
  void* data = static_cast<char*>(t.base) + t.first * size_of(t.dtype);
  if (slot) *slot = data;
  tensors_.push_back(std::move(t));
  return data;
}

void* Tensors::place_keys(Tensor t, const Case& c, const std::vector<double>& values, const void** slot) {
  const Problem& p = c.problem;
  if (p.page_size == 0) return place(std::move(t), &values, slot);
  const std::int64_t heads = t.sizes[2], dim = t.sizes[3], row = heads * dim;
  const auto or_dense = [](std::int64_t stride, std::int64_t dense) { return stride == Strides::dense ? dense : stride; };
  const std::string_view name = t.name;
  const Strides& given = name == "k"         ? p.k_strides
                         : name == "v"       ? p.v_strides
                         : name == "k_scale" ? p.k_scale_strides
                         : name == "v_scale" ? p.v_scale_strides
                         : name[0] == 'k'    ? p.k_group_strides
                                             : p.v_group_strides;
  t.sizes = {p.num_pages, p.page_size, heads, dim};
  t.strides = {or_dense(given.batch, p.page_size * row), or_dense(given.seq, row), or_dense(given.head, dim), 1};
  std::vector<double> pages(p.num_pages * p.page_size * row, NAN);  // what no table names, and what is past a length
  const std::int64_t stride = p.page_table_stride != 0 ? p.page_table_stride : (p.seq_kv + p.page_size - 1) / p.page_size;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t j = 0; j < shape_.sequences[b].len_kv; ++j) {
      const std::int64_t page = c.page_table[b * stride + j / p.page_size];
      std::copy_n(&values[(b * p.seq_kv + j) * row], row, &pages[(page * p.page_size + j % p.page_size) * row]);
    }
  }
  return place(std::move(t), &pages, slot);
}

template <class T>
const T* Tensors::place_plain(const std::vector<T>& values) {
  if (values.empty()) return nullptr;
  void* data = memory_.allocate(values.size() * sizeof(T));
  memory_.write(data, values.data(), values.size() * sizeof(T));
  return static_cast<const T*>(data);
}

Tensors::Tensors(const Case& c, const Inputs& in, Memory& memory) : shape_(c), memory_(memory) {
  const Problem& p = c.problem;
  const auto tensor = [&](const char* name, const Strides& given, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                          bool output) {
    const std::int64_t batch = p.packed ? 1 : p.batch, seq = p.packed ? rows : (p.batch ? rows / p.batch : 0);
    const auto or_dense = [](std::int64_t stride, std::int64_t dense) { return stride == Strides::dense ? dense : stride; };
    return Tensor{.name = name,
                  .dtype = p.dtype,
                  .sizes = {batch, seq, heads, dim},
                  .strides = {p.packed ? 0 : or_dense(given.batch, seq * heads * dim), or_dense(given.seq, heads * dim),
                              or_dense(given.head, dim), 1},
                  .output = output};
  };
  const auto scores = [&](const char* name, const ScoreTensor& s, Dtype dtype, bool dense) {
    Tensor t{.name = name, .dtype = dtype};
    t.sizes = {s.batch_stride ? shape_.batch : 1, s.head_stride ? shape_.heads_q : 1, s.q_stride ? shape_.seq_q : 1,
               shape_.seq_kv};
    t.strides = {s.batch_stride, s.head_stride, s.q_stride, 1};
    if (dense) t.strides = {t.sizes[1] * t.sizes[2] * t.sizes[3], t.sizes[2] * t.sizes[3], t.sizes[3], 1};
    t.output = dense;
    return t;
  };
  const auto flat = [&](const char* name, std::int64_t count, bool output) {
    return Tensor{.name = name, .dtype = Dtype::float32, .sizes = {count}, .strides = {1}, .output = output};
  };
  Tensor q = tensor("q", p.q_strides, shape_.rows_q, shape_.heads_q, shape_.dim, false);
  if (!in.q_codes.empty()) q.dtype = *p.q_dtype;
  place(q, in.q_codes.empty() ? &in.q : &in.q_codes, &buffers_.q);
  const std::int64_t dim_k = p.latent ? shape_.dim - shape_.dim_v : shape_.dim;
  const bool groups = p.kv_dtype && has_groups(*p.kv_dtype);
  Tensor k = tensor("k", p.k_strides, shape_.rows_kv, shape_.heads_kv, dim_k / (groups ? 2 : 1), false);
  Tensor v = tensor("v", p.v_strides, shape_.rows_kv, shape_.heads_kv, shape_.dim_v / (groups ? 2 : 1), false);
  const bool narrow = p.kv_dtype && size_of(*p.kv_dtype) == 1;
  if (narrow) k.dtype = v.dtype = *p.kv_dtype;
  const std::vector<double>& keys = narrow ? in.k_codes : in.k;
  place_keys(k, c, p.latent ? last_columns(keys, shape_.dim, dim_k) : keys, &buffers_.k);
  place_keys(v, c, narrow ? in.v_codes : in.v, &buffers_.v);
  if (c.values_begin_keys) buffers_.v = buffers_.k;
  if (narrow) place_scales(c, in);
  const auto place_groups = [&](const char* name, const std::vector<double>& values, const Strides& given, Dtype dtype) {
    const void* slot = nullptr;
    if (values.empty()) return slot;
    const std::int64_t numbers = static_cast<std::int64_t>(values.size()) / (shape_.rows_kv * shape_.heads_kv);
    Tensor t = tensor(name, given, shape_.rows_kv, shape_.heads_kv, numbers, false);
    t.dtype = dtype;
    place_keys(std::move(t), c, values, &slot);
    return slot;
  };
  const Dtype scales = p.kv_dtype == Dtype::int4 ? p.dtype : p.kv_dtype.value_or(p.dtype);
  buffers_.k_group_scale = place_groups("k_group_scale", in.k_group_scale, p.k_group_strides, scales);
  buffers_.v_group_scale = place_groups("v_group_scale", in.v_group_scale, p.v_group_strides, scales);
  buffers_.k_group_zero = place_groups("k_group_zero", in.k_group_zero, p.k_group_strides, p.dtype);
  buffers_.v_group_zero = place_groups("v_group_zero", in.v_group_zero, p.v_group_strides, p.dtype);
  place_query_scales(in);
  place(tensor("dout", p.dout_strides, shape_.rows_q, shape_.heads_q, shape_.dim_v, false), &in.dout, &buffers_.dout);
  buffers_.out = place(tensor("out", p.out_strides, shape_.rows_q, shape_.heads_q, shape_.dim_v, true), nullptr, nullptr);
  buffers_.lse = static_cast<float*>(place(flat("lse", shape_.rows_q * shape_.heads_q, true), nullptr, nullptr));
  buffers_.dq = place(tensor("dq", p.dq_strides, shape_.rows_q, shape_.heads_q, shape_.dim, true), nullptr, nullptr);
  buffers_.dk = place(tensor("dk", p.dk_strides, shape_.rows_kv, shape_.heads_kv, shape_.dim, true), nullptr, nullptr);
  buffers_.dv = place(tensor("dv", p.dv_strides, shape_.rows_kv, shape_.heads_kv, shape_.dim_v, true), nullptr, nullptr);
  if (p.bias.present) place(scores("bias", p.bias, p.bias.dtype, false), &in.bias, &buffers_.bias);
  if (c.dbias) buffers_.dbias = place(scores("dbias", p.bias, p.bias.dtype, true), nullptr, nullptr);
  if (c.dsink) buffers_.dsink = static_cast<float*>(place(flat("dsink", shape_.heads_q, true), nullptr, nullptr));
  const auto floats = [&](const std::vector<double>& values) {
    return place_plain(std::vector<float>(values.begin(), values.end()));
  };
  buffers_.alibi_slopes = floats(in.alibi_slopes);
  buffers_.sink = floats(in.sink);
  buffers_.dlse = floats(in.dlse);
  const auto statistic = [&](const char* name, bool present, std::int64_t count) {
    return present ? static_cast<float*>(place(flat(name, count, true), nullptr, nullptr)) : nullptr;
  };
  buffers_.max_logit = statistic("max_logit", p.return_max_logit, shape_.batch * shape_.heads_q);
  buffers_.key_mass = statistic("key_mass", p.return_key_mass, mass_elements(c, shape_));
  buffers_.entropy = statistic("entropy", p.return_entropy, shape_.rows_q * shape_.heads_q);
  buffers_.dentropy = floats(in.dentropy);
  buffers_.dkey_mass = floats(in.dkey_mass);
  if (p.mask.present) buffers_.mask = place_mask(p.mask, in.mask);
  buffers_.hidden_rows = place_plain(in.hidden_rows);
  buffers_.block_mask = place_plain(in.block_mask);
  buffers_.bit_mask = place_plain(in.bit_mask);
  buffers_.bit_mask_offsets = place_plain(in.bit_mask_offsets);
  buffers_.sequence_windows = place_plain(c.sequence_windows);
  buffers_.key_list = place_plain(in.key_list);
  buffers_.key_counts = place_plain(in.key_counts);
  buffers_.cu_seqlens_q = place_plain(c.cu_seqlens_q);
  buffers_.cu_seqlens_kv = place_plain(c.cu_seqlens_kv);
  buffers_.seqused_q = place_plain(c.seqused_q);
  buffers_.seqused_kv = place_plain(c.seqused_kv);
  buffers_.key_lengths = place_plain(c.key_lengths);
  buffers_.left_padding = place_plain(c.left_padding);
  buffers_.page_table = place_plain(c.page_table);
  if (c.program != CaseProgram::none) place_program(c, in);
}

void Tensors::place_program(const Case& c, const Inputs& in) {
  program_tensor_ = place_plain(in.program_ints);
  const auto count = static_cast<std::int64_t>(in.program_reals.size());
  const Tensor reals{.name = "program_reals", .dtype = Dtype::float32, .sizes = {count}, .strides = {1}};
  if (count > 0) place(reals, &in.program_reals, &program_tensor_);
  if (c.dprogram) {
    Tensor gradient = reals;
    gradient.name = "dprogram", gradient.output = true;
    program_gradient_ = static_cast<float*>(place(gradient, nullptr, nullptr));
  }
  program_scalars_ = in.program_scalars;
  buffers_.program_tensors = &program_tensor_;
  buffers_.program_gradients = &program_gradient_;
  buffers_.program_scalars = program_scalars_.data();
}

void Tensors::place_scales(const Case& c, const Inputs& in) {
  const Problem& p = c.problem;
  if (p.kv_scales == ScaleKind::none) return;
  const auto put = [&](const char* name, const std::vector<double>& values, const Strides& given) {
    const void* slot = nullptr;
    const auto or_dense = [](std::int64_t stride, std::int64_t dense) { return stride == Strides::dense ? dense : stride; };
    Tensor t{.name = name, .dtype = Dtype::float32};
    if (p.kv_scales == ScaleKind::token) {
      const bool packed = p.packed && p.page_size == 0;
      const std::int64_t batch = packed ? 1 : p.batch, seq = packed ? shape_.rows_kv : p.seq_kv;
      t.sizes = {batch, seq, shape_.heads_kv, 1};
      t.strides = {packed ? 0 : or_dense(given.batch, seq * shape_.heads_kv), or_dense(given.seq, shape_.heads_kv),
                   or_dense(given.head, 1), 1};
      place_keys(std::move(t), c, values, &slot);
    } else {
      t.sizes = {static_cast<std::int64_t>(values.size())};
      t.strides = {1};
      place(std::move(t), &values, &slot);
    }
    return static_cast<const float*>(slot);
  };
  buffers_.k_scale = put("k_scale", in.k_scale, p.k_scale_strides);
  buffers_.v_scale = put("v_scale", in.v_scale, p.v_scale_strides);
}

void Tensors::place_query_scales(const Inputs& in) {
  if (in.q_scale.empty()) return;
  const void* slot = nullptr;
  place(
      {.name = "q_scale", .dtype = Dtype::float32, .sizes = {static_cast<std::int64_t>(in.q_scale.size())}, .strides = {1}},
      &in.q_scale, &slot);
  buffers_.q_scale = static_cast<const float*>(slot);
}

const std::uint8_t* Tensors::place_mask(const ScoreTensor& mask, const std::vector<std::uint8_t>& values) {
  const std::vector<std::int64_t> sizes{mask.batch_stride ? shape_.batch : 1, mask.head_stride ? shape_.heads_q : 1,
                                        mask.q_stride ? shape_.seq_q : 1, shape_.seq_kv};
  const std::vector<std::int64_t> strides{mask.batch_stride, mask.head_stride, mask.q_stride, 1};
  std::vector<std::uint8_t> bytes;
  each_element(sizes, strides, [&](std::int64_t index, std::int64_t offset) {
    if (offset >= static_cast<std::int64_t>(bytes.size())) bytes.resize(offset + 1, index % 2 == 0 ? 0xaa : 0);
    bytes[offset] = values[index];
  });
  return place_plain(bytes);
}

void Tensors::add_tangents(const Inputs& tangents) {
  const auto twin = [&](const char* of, const char* name) {
    Tensor tensor = *std::find_if(tensors_.begin(), tensors_.end(),
                                  [&](const Tensor& known) { return std::strcmp(known.name, of) == 0; });
    tensor.name = name;
    return tensor;
  };
  if (!tangents.q.empty()) place(twin("q", "q_tangent"), &tangents.q, &buffers_.q_tangent);
  if (!tangents.k.empty()) place(twin("k", "k_tangent"), &tangents.k, &buffers_.k_tangent);
  if (!tangents.v.empty()) place(twin("v", "v_tangent"), &tangents.v, &buffers_.v_tangent);
  if (!tangents.bias.empty()) place(twin("bias", "bias_tangent"), &tangents.bias, &buffers_.bias_tangent);
  if (!tangents.sink.empty())
    buffers_.sink_tangent = place_plain(std::vector<float>(tangents.sink.begin(), tangents.sink.end()));
  buffers_.out_tangent = place(twin("out", "out_tangent"), nullptr, nullptr);
  buffers_.lse_tangent = static_cast<float*>(place(twin("lse", "lse_tangent"), nullptr, nullptr));
}

void Tensors::set_forward(const Results& results) {
  for (Tensor& t : tensors_) {
    const bool is_out = std::strcmp(t.name, "out") == 0, is_entropy = std::strcmp(t.name, "entropy") == 0;
    if (!is_out && !is_entropy && std::strcmp(t.name, "lse") != 0) continue;
    const std::vector<double>& from = is_out ? results.out : is_entropy ? results.entropy : results.lse;
    if (t.elements == 0) continue;
    std::vector<std::byte> bytes = filled(t.dtype, t.elements);
    each_element(t.sizes, t.strides,
                 [&](std::int64_t index, std::int64_t offset) { store(bytes, t.dtype, t.first + offset, from[index]); });
    memory_.write(t.base, bytes.data(), bytes.size());
  }
}

std::vector<double> Tensors::values(const char* name) {
  for (Tensor& t : tensors_) {
    if (std::strcmp(t.name, name) != 0 || t.elements == 0) continue;
    std::vector<std::byte> bytes(t.elements * size_of(t.dtype));
    memory_.read(bytes.data(), t.base, bytes.size());
    std::vector<double> out;
    each_element(t.sizes, t.strides,
                 [&](std::int64_t, std::int64_t offset) { out.push_back(load(bytes, t.dtype, t.first + offset)); });
    return out;
  }
  return {};
}

Results Tensors::read(bool backward) {
  Results r;
  r.out = values("out");
  r.lse = values("lse");
  r.max_logit = values("max_logit");
  r.key_mass = values("key_mass");
  r.entropy = values("entropy");
  r.out_tangent = values("out_tangent");
  r.lse_tangent = values("lse_tangent");
  if (!backward) return r;
  r.dq = values("dq");
  r.dk = values("dk");
  r.dv = values("dv");
  r.dbias = values("dbias");
  r.dsink = values("dsink");
  r.dprogram = values("dprogram");
  return r;
}

std::string Tensors::written_gap() {
  for (Tensor& t : tensors_) {
    if (!t.output || t.elements == 0) continue;
    std::vector<std::byte> bytes(t.elements * size_of(t.dtype));
    memory_.read(bytes.data(), t.base, bytes.size());
    std::vector<bool> inside(t.elements);
    each_element(t.sizes, t.strides, [&](std::int64_t, std::int64_t offset) { inside[t.first + offset] = true; });
    for (std::int64_t x = 0; x < t.elements; ++x) {
      if (!inside[x] && !is_fill(bytes, t.dtype, x))
        return std::string(t.name) + " at offset " + std::to_string(x - t.first);
    }
  }
  return "";
}

}  // namespace flash_attention::testing
