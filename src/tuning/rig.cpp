#include "tuning/rig.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "flash_attention/error.h"
#include "support/ceil_div.h"
#include "support/half.h"
#include "support/narrow.h"
#include "tuning/block.h"

namespace flash_attention::tuning {
namespace {

/// Numbers close to a normal distribution, the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {  // splitmix64
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  float normal() {
    const std::uint64_t x = next();
    const auto sum = static_cast<std::int64_t>((x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48));
    constexpr float deviation = 65536.0f * 0.57735027f;
    return static_cast<float>(sum - 2 * 65535) / deviation;
  }

 private:
  std::uint64_t state_;
};

void store(void* data, Dtype dtype, std::int64_t i, float value) {
  switch (dtype) {
    case Dtype::float32:
      static_cast<float*>(data)[i] = value;
      return;
    case Dtype::float16:
      static_cast<std::uint16_t*>(data)[i] = support::fp16_of_float(value);
      return;
    case Dtype::bfloat16:
      static_cast<std::uint16_t*>(data)[i] = support::bf16_of_float(value);
      return;
    case Dtype::float8_e4m3:
      static_cast<std::uint8_t*>(data)[i] = support::e4m3_of_float(value);
      return;
    case Dtype::float8_e5m2:
      static_cast<std::uint8_t*>(data)[i] = support::e5m2_of_float(value);
      return;
    case Dtype::int8:
      static_cast<std::int8_t*>(data)[i] = support::int8_of_float(32 * value);
      return;
    case Dtype::nvfp4:  // any two codes
    case Dtype::mxfp4:
    case Dtype::int4:
      static_cast<std::uint8_t*>(data)[i] = static_cast<std::uint8_t>(support::int8_of_float(64 * value));
      return;
  }
}

float load(const void* data, Dtype dtype, std::int64_t i) {
  if (dtype == Dtype::float32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return dtype == Dtype::float16 ? support::float_of_fp16(bits) : support::float_of_bf16(bits);
}

/// The axes of a tensor and the places of its elements.
struct Layout {
  std::int64_t batch, seq, heads, dim;
  Strides strides;

  std::int64_t elements() const {
    if (batch == 0 || seq == 0) return 0;
    return (batch - 1) * strides.batch + (seq - 1) * strides.seq + (heads - 1) * strides.head + dim;
  }
  template <class Visit>
  void each_row(const Visit& visit) const {
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t s = 0; s < seq; ++s)
        for (std::int64_t h = 0; h < heads; ++h) visit(b, s, b * strides.batch + s * strides.seq + h * strides.head);
  }
};

Layout query_layout(const Problem& p, const Strides& strides, std::int64_t dim) {
  return {p.packed ? 1 : p.batch, p.packed ? p.total_q : p.seq_q, p.heads_q, dim, strides};
}
Layout key_layout(const Problem& p, const Strides& strides, std::int64_t dim) {
  if (p.page_size != 0) return {p.num_pages, p.page_size, p.heads_kv, dim, strides};
  return {p.packed ? 1 : p.batch, p.packed ? p.total_kv : p.seq_kv, p.heads_kv, dim, strides};
}

/// The longest sequence first. The others share the rest evenly.
std::vector<std::int32_t> ends_of_sequences(std::int64_t batch, std::int64_t total, std::int64_t longest) {
  std::vector<std::int32_t> ends(static_cast<std::size_t>(batch) + 1, 0);
  std::int64_t at = std::min(total, longest);
  const std::int64_t others = std::max<std::int64_t>(batch - 1, 1), rest = total - at;
  for (std::int64_t b = 1; b <= batch; ++b) {
    ends[static_cast<std::size_t>(b)] = static_cast<std::int32_t>(at + rest * (b - 1) / others);
  }
  if (batch > 0) ends.back() = static_cast<std::int32_t>(total);
  return ends;
}

double epsilon(const Problem& p) {
  if (p.q_dtype && size_of(*p.q_dtype) == 1) return 0x1p-4;  // probabilities are rounded in the same way as queries
  if (p.dtype == Dtype::bfloat16) return 0x1p-8;
  if (p.dtype == Dtype::float16) return 0x1p-10;
  return p.precision == Precision::tf32 ? 0x1p-10 : 0x1p-16;
}

double root_mean_square(const float* values, std::int64_t count) {
  double sum = 0;
  std::int64_t finite = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::isfinite(values[i])) sum += double{values[i]} * double{values[i]}, ++finite;
  }
  return finite == 0 ? 0 : std::sqrt(sum / static_cast<double>(finite));
}

// random numbers from which all rows are copied, so that large tensors are made quickly
constexpr std::int64_t pool_elements = 1 << 18;

/// Both infinite with the same sign, or both NaN.
bool alike(float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); }

std::string difference(const Result& got, const Result& expected, double epsilon) {
  const auto count = static_cast<std::int64_t>(expected.values.size());
  const bool is_lse = expected.tensor == "lse", is_gradient = expected.tensor.starts_with("d");
  const double all = root_mean_square(expected.values.data(), count);
  double squares = 0;
  for (std::int64_t begin = 0; begin < count; begin += expected.row) {
    const std::int64_t width = std::min(expected.row, count - begin);
    const double of_row = root_mean_square(expected.values.data() + begin, width);
    const double size = is_gradient ? std::max(all, of_row) : of_row;
    for (std::int64_t i = begin; i < begin + width; ++i) {
      const float x = got.values[static_cast<std::size_t>(i)], y = expected.values[static_cast<std::size_t>(i)];
      if (alike(x, y)) continue;
      const double error = std::abs(double{x} - double{y});
      const double allowed = is_lse ? 1e-3 * (1 + std::abs(double{y})) : epsilon * (8 * size + 4 * std::abs(double{y}));
      if (!(error <= allowed)) {  // also true if error is NaN
        return expected.tensor + "[" + std::to_string(i) + "] is " + std::to_string(x) + " and should be " +
               std::to_string(y);
      }
      squares += error * error;
    }
  }
  if (is_lse || count == 0) return {};
  const double error = std::sqrt(squares / static_cast<double>(count));
  if (error <= 2 * epsilon * all + std::numeric_limits<double>::min()) return {};
  return expected.tensor + " differs by " + std::to_string(error / all) + " of its size";
}

bool has_gradients(Pass pass) { return pass == Pass::backward || pass == Pass::second; }
bool has_tangents(Pass pass) { return pass == Pass::tangent || pass == Pass::second; }

}  // namespace

std::string unmeasurable(const Problem& p) {
  if (p.mask.present || p.hidden_rows.bounds != 0 || p.block_mask.block_q != 0 || p.key_list.kind != KeyListKind::none ||
      p.bit_mask.kind != BitMaskKind::none || p.sequence_windows)
    return "which keys its mask shows is not known from sizes alone";
  if (!p.program.empty()) return "what its program reads is not known from sizes alone";
  for (const Strides& strides : {p.q_strides, p.k_strides, p.v_strides, p.out_strides}) {
    if (strides.batch < 0 || strides.seq < 0 || strides.head < 0) return "it has negative strides";
  }
  if (p.packed && p.page_size == 0 && (p.total_q > p.batch * p.seq_q || p.total_kv > p.batch * p.seq_kv))
    return "its sequences are longer than the longest one";
  if (p.batch == 0 || p.seq_q == 0 || p.seq_kv == 0) return "it has nothing to compute";
  return {};
}

std::string difference(const Problem& problem, const std::vector<Result>& got, const std::vector<Result>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    std::string found = difference(got[i], expected[i], epsilon(problem));
    if (!found.empty()) return found;
  }
  return {};
}

struct Rig::Tensors {
  Block q, k, v, out, lse, dout, dq, dk, dv, out_tangent, lse_tangent;
  Block bias, slopes, sink, cu_q, cu_kv, seqused_q, seqused_kv, key_lengths, left_padding, page_table;
  Block q_scale, k_scale, v_scale, workspace;
  Block k_groups, v_groups, k_zeros, v_zeros;
  std::unique_ptr<Clock> clock;
  Buffers buffers{};
};

Rig::~Rig() = default;

Rig::Rig(const Call& call, const DeviceInfo& device, const Backend& backend, Inputs inputs)
    : call_(call), device_(device), backend_(backend), tensors_(std::make_unique<Tensors>()) {
  const Problem& p = call.problem;
  const bool hostile = inputs == Inputs::hostile, backward = has_gradients(call.pass);
  Tensors& t = *tensors_;
  Buffers& b = t.buffers;
  const auto block = [&](std::int64_t elements, std::size_t size) {
    return Block(backend, device.device, static_cast<std::size_t>(elements) * size);
  };
  const auto kv_length = [&](std::int64_t batch) {  // hostile: less than the capacity
    return hostile ? std::max<std::int64_t>(0, p.seq_kv - 5 - 7 * batch) : p.seq_kv;
  };
  const bool short_keys = (p.seqused_kv || p.key_lengths) && p.page_size == 0 && !p.packed;
  const auto numbers = [&](const Layout& layout, Dtype dtype, std::uint64_t seed, bool is_key) {
    Block made = block(layout.elements(), size_of(dtype));
    Random random(seed);
    const std::size_t size = size_of(dtype);
    // rows begin at different places of the pool
    std::vector<char> pool(static_cast<std::size_t>(pool_elements + layout.dim) * size);
    for (std::int64_t i = 0; i < pool_elements + layout.dim; ++i) store(pool.data(), dtype, i, random.normal());
    layout.each_row([&](std::int64_t batch, std::int64_t row, std::int64_t begin) {
      const std::size_t place = random.next() % pool_elements;
      std::memcpy(made.host<char>() + static_cast<std::size_t>(begin) * size, pool.data() + place * size,
                  static_cast<std::size_t>(layout.dim) * size);
      const bool last = hostile && is_key && row + 9 > layout.seq;
      const bool unused = hostile && is_key && short_keys && row >= kv_length(batch) && dtype < Dtype::int8;
      for (std::int64_t i = 0; (last || unused) && i < layout.dim; ++i)
        store(made.host(), dtype, begin + i, unused ? NAN : 6 * random.normal());
    });
    made.upload();
    return made;
  };
  const auto small = [&](std::int64_t count, const auto& value) {
    using T = decltype(value(std::int64_t{0}));
    Block made = block(count, sizeof(T));
    for (std::int64_t i = 0; i < count; ++i) made.template host<T>()[i] = value(i);
    made.upload();
    return made;
  };
  const auto ints = [&](const std::vector<std::int32_t>& values) {
    return small(static_cast<std::int64_t>(values.size()), [&](std::int64_t i) { return values[static_cast<std::size_t>(i)]; });
  };

  const Dtype q_dtype = p.q_dtype.value_or(p.dtype), kv_dtype = p.kv_dtype.value_or(p.dtype);
  const std::int64_t key_dim = p.head_dim - (p.latent ? p.head_dim_v : 0);
  t.q = numbers(query_layout(p, p.q_strides, p.head_dim), q_dtype, 1, false);
  t.k = numbers(key_layout(p, p.k_strides, stored_columns(kv_dtype, key_dim)), kv_dtype, 2, true);
  t.v = numbers(key_layout(p, p.v_strides, stored_columns(kv_dtype, p.head_dim_v)), kv_dtype, 3, true);
  t.out = block(query_layout(p, p.out_strides, p.head_dim_v).elements(), size_of(p.dtype));
  const std::int64_t rows = p.heads_q * (p.packed ? p.total_q : p.batch * p.seq_q);
  t.lse = block(rows, sizeof(float));
  b.q = t.q.there(), b.k = t.k.there(), b.v = t.v.there(), b.out = t.out.there(), b.lse = t.lse.there<float>();

  if (p.bias.present) {
    const std::int64_t elements = (p.batch - 1) * p.bias.batch_stride + (p.heads_q - 1) * p.bias.head_stride +
                                  (p.seq_q - 1) * p.bias.q_stride + p.seq_kv;
    t.bias = numbers({1, 1, 1, elements, {0, 0, 0}}, p.bias.dtype, 5, false);
    b.bias = t.bias.there();
  }
  if (p.alibi) {
    t.slopes = small(p.alibi_batch_stride == 0 ? p.heads_q : (p.batch - 1) * p.alibi_batch_stride + p.heads_q,
                     [&](std::int64_t i) {
                       return static_cast<float>(
                           std::exp2(-8.0 * static_cast<double>(i % p.heads_q + 1) / static_cast<double>(p.heads_q)));
                     });
    b.alibi_slopes = t.slopes.there<float>();
  }
  if (p.sink) {
    t.sink = small(p.heads_q, [](std::int64_t i) { return 0.25f * static_cast<float>(i % 5) - 0.5f; });
    b.sink = t.sink.there<float>();
  }
  if (p.packed) {
    t.cu_q = ints(ends_of_sequences(p.batch, p.total_q, p.seq_q));
    b.cu_seqlens_q = t.cu_q.there<std::int32_t>();
    if (p.page_size == 0) {
      t.cu_kv = ints(ends_of_sequences(p.batch, p.total_kv, p.seq_kv));
      b.cu_seqlens_kv = t.cu_kv.there<std::int32_t>();
    }
  }
  const auto lengths = [&](bool present, Block& made, const std::int32_t*& pointer, const auto& of) {
    if (!present) return;
    made = small(p.batch, [&](std::int64_t i) { return static_cast<std::int32_t>(of(i)); });
    pointer = made.template there<std::int32_t>();
  };
  const auto own_rows = [&](const Block& ends, std::int64_t i, std::int64_t otherwise) {  // of a packed sequence
    if (!p.packed || ends.bytes() == 0) return otherwise;
    return std::int64_t{ends.host<std::int32_t>()[i + 1]} - ends.host<std::int32_t>()[i];
  };
  lengths(p.seqused_q, t.seqused_q, b.seqused_q, [&](std::int64_t i) { return own_rows(t.cu_q, i, p.seq_q); });
  lengths(p.seqused_kv, t.seqused_kv, b.seqused_kv, [&](std::int64_t i) { return own_rows(t.cu_kv, i, kv_length(i)); });
  lengths(p.key_lengths, t.key_lengths, b.key_lengths, [&](std::int64_t i) { return own_rows(t.cu_kv, i, kv_length(i)); });
  lengths(p.left_padding, t.left_padding, b.left_padding, [&](std::int64_t i) { return hostile ? 3 * i : 0; });
  if (p.page_size != 0) {
    const std::int64_t needed = ceil_div(p.seq_kv, p.page_size);
    std::vector<std::int32_t> pages(static_cast<std::size_t>(p.num_pages));
    std::iota(pages.begin(), pages.end(), 0);
    Random random(7);
    for (std::size_t i = pages.size(); i > 1; --i) std::swap(pages[i - 1], pages[random.next() % i]);
    t.page_table = small((p.batch - 1) * p.page_table_stride + needed, [&](std::int64_t i) {
      const std::int64_t entry = i / std::max<std::int64_t>(p.page_table_stride, 1) * needed + i % p.page_table_stride;
      return pages[static_cast<std::size_t>(entry % p.num_pages)];
    });
    b.page_table = t.page_table.there<std::int32_t>();
  }
  const auto scales = [&](ScaleKind kind, const Strides& strides, const Layout& keys, Block& made, const float*& pointer) {
    if (kind == ScaleKind::none) return;
    const std::int64_t count = kind == ScaleKind::tensor ? 1
                               : kind == ScaleKind::head ? p.batch * p.heads_kv
                                                         : Layout{keys.batch, keys.seq, keys.heads, 1, strides}.elements();
    made = small(count, [](std::int64_t i) { return 1 + 0.01f * static_cast<float>(i % 50); });
    pointer = made.template there<float>();
  };
  const auto groups = [&](const Strides& strides, std::int64_t dim, bool zeros, Block& made, const void*& pointer) {
    if (p.kv_group == 0 || (zeros && kv_dtype != Dtype::int4)) return;
    const Layout layout = key_layout(p, strides, dim / p.kv_group);
    made = block(layout.elements(), kv_dtype == Dtype::int4 ? size_of(p.dtype) : 1);
    for (std::int64_t i = 0; i < layout.elements(); ++i) {
      if (kv_dtype == Dtype::int4) {
        store(made.host(), p.dtype, i, zeros ? -1.5f : 0.125f + 0.01f * static_cast<float>(i % 20));
      } else {
        made.host<std::uint8_t>()[i] = static_cast<std::uint8_t>((kv_dtype == Dtype::nvfp4 ? 0x24 : 124) + i % 3);
      }
    }
    made.upload();
    pointer = made.there();
  };
  groups(p.k_group_strides, key_dim, false, t.k_groups, b.k_group_scale);
  groups(p.v_group_strides, p.head_dim_v, false, t.v_groups, b.v_group_scale);
  groups(p.k_group_strides, key_dim, true, t.k_zeros, b.k_group_zero);
  groups(p.v_group_strides, p.head_dim_v, true, t.v_zeros, b.v_group_zero);
  const Layout keys = key_layout(p, p.k_strides, key_dim);
  scales(p.kv_scales, p.k_scale_strides, keys, t.k_scale, b.k_scale);
  scales(p.kv_scales, p.v_scale_strides, keys, t.v_scale, b.v_scale);
  scales(p.q_scales, p.q_scale_strides, keys, t.q_scale, b.q_scale);
  if (has_tangents(call.pass)) {  // each tensor is its own tangent
    b.q_tangent = b.q, b.k_tangent = b.k, b.v_tangent = b.v;
    t.out_tangent = block(query_layout(p, p.out_strides, p.head_dim_v).elements(), size_of(p.dtype));
    t.lse_tangent = block(rows, sizeof(float));
    b.out_tangent = t.out_tangent.there(), b.lse_tangent = t.lse_tangent.there<float>();
  }
  if (!backward) return;
  t.dout = numbers(query_layout(p, p.dout_strides, p.head_dim_v), p.dtype, 4, false);
  t.dq = block(query_layout(p, p.dq_strides, p.head_dim).elements(), size_of(p.dtype));
  t.dk = block(key_layout(p, p.dk_strides, p.head_dim).elements(), size_of(p.dtype));
  t.dv = block(key_layout(p, p.dv_strides, p.head_dim_v).elements(), size_of(p.dtype));
  b.dout = t.dout.there(), b.dq = t.dq.there(), b.dk = t.dk.there(), b.dv = t.dv.there();
}

void Rig::ensure_workspace(const Plan& plan) {
  if (tensors_->workspace.bytes() >= plan.workspace_bytes) return;
  tensors_->workspace = {};
  tensors_->workspace = Block(backend_, device_.device, plan.workspace_bytes);
}

void Rig::run(const Kernel& kernel, const Plan& plan) {
  ensure_workspace(plan);
  Options options;
  options.device = device_.device;
  options.workspace = tensors_->workspace.there();
  options.workspace_bytes = tensors_->workspace.bytes();
  options.seed = 17;
  kernel.launch(plan.pass == call_.pass ? call_.problem : call_.forward, plan, tensors_->buffers, options);
}

double Rig::seconds(const Kernel& kernel, const Plan& plan) {
  ensure_workspace(plan);
  if (backend_.clock != nullptr) {
    if (!tensors_->clock) tensors_->clock = backend_.clock(device_);
    return tensors_->clock->seconds(nullptr, [&] { run(kernel, plan); });
  }
  const auto start = std::chrono::steady_clock::now();
  run(kernel, plan);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Rig::take_forward_results(const Rig& other) {
  const auto take = [](const Block& to, const Block& from) {
    from.download();
    std::memcpy(to.host(), from.host(), to.bytes());
    to.upload();
  };
  take(tensors_->out, other.tensors_->out);
  take(tensors_->lse, other.tensors_->lse);
}

void Rig::clear_results() {
  const Tensors& t = *tensors_;
  auto written = has_gradients(call_.pass) ? std::vector{&t.dq, &t.dk, &t.dv} : std::vector{&t.out, &t.lse};
  if (has_tangents(call_.pass)) written.insert(written.end(), {&t.out_tangent, &t.lse_tangent});
  for (const Block* block : written) {
    std::memset(block->host(), 0xff, block->bytes());
    block->upload();
  }
}

std::vector<Result> Rig::results(std::int64_t most) const {
  const Problem& p = call_.problem;
  const Tensors& t = *tensors_;
  const auto read = [&](const char* name, const Block& block, const Layout& layout) {
    block.download();
    Result result{.tensor = name, .values = {}, .row = layout.dim};
    // odd, so that rows of all heads are included
    const std::int64_t every = layout.batch * layout.seq * layout.heads * layout.dim / most | 1;
    std::int64_t row = 0;
    layout.each_row([&](std::int64_t, std::int64_t, std::int64_t begin) {
      if (row++ % every != 0) return;
      for (std::int64_t i = 0; i < layout.dim; ++i) result.values.push_back(load(block.host(), p.dtype, begin + i));
    });
    return result;
  };
  const auto of_rows = [&](const char* name, const Block& block) {
    block.download();
    const auto* const values = block.host<float>();
    return Result{.tensor = name, .values = {values, values + block.bytes() / sizeof(float)}, .row = 1};
  };
  const Layout of_out = query_layout(p, p.out_strides, p.head_dim_v);
  std::vector<Result> results;
  if (has_gradients(call_.pass)) {
    results = {read("dq", t.dq, query_layout(p, p.dq_strides, p.head_dim)),
               read("dk", t.dk, key_layout(p, p.dk_strides, p.head_dim)),
               read("dv", t.dv, key_layout(p, p.dv_strides, p.head_dim_v))};
  } else {
    results = {read("out", t.out, of_out), of_rows("lse", t.lse)};
  }
  if (has_tangents(call_.pass)) {
    results.push_back(read("out_tangent", t.out_tangent, of_out));
    results.push_back(of_rows("lse_tangent", t.lse_tangent));
  }
  return results;
}

}  // namespace flash_attention::tuning
