// Every refusal of the contract: it must name the argument, the value and what is allowed, and leave the outputs alone.
#include "api/checks/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "flash_attention/attention.h"
#include "support/cases/contract.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

const DeviceInfo laptop{.device = {}, .isa = CpuIsa::generic, .threads = 1};

struct Refusal {
  const char* name;
  const char* argument;  // the message begins with it
  const char* value;     // and contains this
  void (*breaks)(Problem&);
};

Problem good() { return {.batch = 2, .seq_q = 5, .seq_kv = 7, .heads_q = 4, .heads_kv = 2, .head_dim = 16}; }

void expect_refused(const std::function<void()>& call, const std::string& argument, const std::string& value) {
  try {
    call();
    FAIL() << "not refused: " << argument;
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << message;
    EXPECT_TRUE(message.starts_with(argument + ": got ")) << message;
    EXPECT_NE(message.find(value), std::string::npos) << message;
    EXPECT_NE(message.find("; "), std::string::npos) << message;
  }
}

using ProblemRefusal = ::testing::TestWithParam<Refusal>;

TEST_P(ProblemRefusal, NamesArgumentAndValue) {
  Problem problem = good();
  GetParam().breaks(problem);
  expect_refused([&] { make_plan(problem, Pass::backward, laptop); }, GetParam().argument, GetParam().value);
}

const Refusal refusals[] = {
    {"batch", "batch", "-1", [](Problem& p) { p.batch = -1; }},
    {"packed_rows_without_sequences", "batch", "0", [](Problem& p) { p.batch = 0, p.packed = true, p.total_kv = 3; }},
    {"seq_q", "seq_q", "-5", [](Problem& p) { p.seq_q = -5; }},
    {"seq_kv", "seq_kv", "99999999999", [](Problem& p) { p.seq_kv = 99999999999; }},
    {"no_heads", "heads_q", "0", [](Problem& p) { p.heads_q = 0; }},
    {"no_kv_heads", "heads_kv", "0", [](Problem& p) { p.heads_kv = 0; }},
    {"indivisible", "heads_q", "4", [](Problem& p) { p.heads_kv = 3; }},
    {"head_dim_zero", "head_dim", "0", [](Problem& p) { p.head_dim = 0; }},
    {"head_dim_large", "head_dim", "577", [](Problem& p) { p.head_dim = 577; }},
    {"head_dim_v", "head_dim_v", "-8", [](Problem& p) { p.head_dim_v = -8; }},
    {"head_dim_v_large", "head_dim_v", "allowed are 1 to 576", [](Problem& p) { p.head_dim_v = 600; }},
    {"dtype", "dtype", "9", [](Problem& p) { p.dtype = static_cast<Dtype>(9); }},
    {"bias_dtype", "bias.dtype", "7", [](Problem& p) { p.bias = {.present = true, .dtype = static_cast<Dtype>(7)}; }},
    {"scale", "scale", "nan", [](Problem& p) { p.scale = NAN; }},
    {"softcap", "softcap", "-2", [](Problem& p) { p.softcap = -2; }},
    {"softcap_without_reciprocal", "softcap", "normal numbers", [](Problem& p) { p.softcap = 1e-45f; }},
    {"dropout_one", "dropout_p", "1", [](Problem& p) { p.dropout_p = 1; }},
    {"dropout_negative", "dropout_p", "-0.1", [](Problem& p) { p.dropout_p = -0.1f; }},
    {"dropout_nan", "dropout_p", "nan", [](Problem& p) { p.dropout_p = NAN; }},
    {"window_left", "window_left", "-2", [](Problem& p) { p.window_left = -2; }},
    {"window_right", "window_right", "-7", [](Problem& p) { p.window_right = -7; }},
    {"alignment", "alignment", "5", [](Problem& p) { p.alignment = static_cast<Alignment>(5); }},
    {"total_without_packed", "total_q", "3", [](Problem& p) { p.total_q = 3; }},
    {"stride_out_of_range", "q_strides", "4611686018427387904",
     [](Problem& p) { p.q_strides.seq = std::int64_t{1} << 62; }},
    {"bias_stride_out_of_range", "bias strides", "4611686018427387904",
     [](Problem& p) { p.bias = {.present = true, .head_stride = std::int64_t{1} << 62}; }},
    {"mask_stride_out_of_range", "mask strides", "-9223372036854775808",
     [](Problem& p) { p.mask = {.present = true, .q_stride = std::numeric_limits<std::int64_t>::min()}; }},
    {"hidden_bounds", "hidden_rows.bounds", "3", [](Problem& p) { p.hidden_rows.bounds = 3; }},
    {"hidden_stride_out_of_range", "hidden_rows.head_stride", "4611686018427387904",
     [](Problem& p) { p.hidden_rows = {.bounds = 1, .head_stride = std::int64_t{1} << 62}; }},
    {"mask_block_q", "block_mask.block_q", "-64", [](Problem& p) { p.block_mask = {.block_q = -64, .block_kv = 64}; }},
    {"mask_block_kv", "block_mask.block_kv", "0", [](Problem& p) { p.block_mask.block_q = 64; }},
    {"block_mask_stride_out_of_range", "block_mask.batch_stride", "4611686018427387904",
     [](Problem& p) { p.block_mask = {.block_q = 8, .block_kv = 8, .batch_stride = std::int64_t{1} << 62}; }},
    {"alibi_stride_out_of_range", "alibi_batch_stride", "9223372036854775807",
     [](Problem& p) { p.alibi = true, p.alibi_batch_stride = std::numeric_limits<std::int64_t>::max(); }},
    {"output_overlaps_itself", "dq_strides", "(320, 0, 16)",
     [](Problem& p) {
       p.dq_strides = {320, 0, 16};
     }},
    {"output_rows_too_close", "dk_strides", "16",
     [](Problem& p) {
       p.dk_strides = {320, 16, 8};
     }},
};

INSTANTIATE_TEST_SUITE_P(Contract, ProblemRefusal, ::testing::ValuesIn(refusals),
                         [](const auto& param) { return param.param.name; });

/// 20 pages of 4, of which a sequence of 7 keys needs 2.
Problem good_pages() {
  Problem p = good();
  p.page_size = 4, p.num_pages = 20, p.page_table_stride = 3, p.seqused_kv = true;
  return p;
}

using CacheRefusal = ::testing::TestWithParam<Refusal>;

TEST_P(CacheRefusal, NamesArgumentAndValue) {
  Problem problem = good_pages();
  GetParam().breaks(problem);
  expect_refused([&] { make_plan(problem, Pass::forward, laptop); }, GetParam().argument, GetParam().value);
}

const Refusal cache_refusals[] = {
    {"page_size", "page_size", "-16", [](Problem& p) { p.page_size = -16; }},
    {"no_page", "num_pages", "0", [](Problem& p) { p.num_pages = 0; }},
    {"pages_without_size", "num_pages", "20", [](Problem& p) { p.page_size = 0; }},
    {"table_without_pages", "page_table_stride", "3", [](Problem& p) { p.page_size = p.num_pages = 0; }},
    {"too_many_rows", "num_pages * page_size", "4611686014132420609",
     [](Problem& p) { p.page_size = p.num_pages = std::numeric_limits<std::int32_t>::max(); }},
    {"narrow_table", "page_table_stride", "7 keys need 2 pages of 4", [](Problem& p) { p.page_table_stride = 1; }},
    {"negative_table", "page_table_stride", "-3", [](Problem& p) { p.page_table_stride = -3; }},
    {"page_stride_out_of_range", "k_strides", "4611686018427387904",
     [](Problem& p) { p.k_strides.batch = std::int64_t{1} << 62; }},
    {"packed_without_lengths", "seqused_kv", "0",
     [](Problem& p) { p.packed = true, p.total_q = 10, p.seqused_kv = false; }},
    {"total_of_pages", "total_kv", "14", [](Problem& p) { p.total_kv = 14; }},
    {"latent_narrower_than_its_value", "head_dim", "from head_dim_v, 64",
     [](Problem& p) { p.latent = true, p.head_dim = 56, p.head_dim_v = 64; }},
    {"latent_too_wide", "head_dim", "584", [](Problem& p) { p.latent = true, p.head_dim = 584, p.head_dim_v = 512; }},
    {"largest_score_of_pages", "return_max_logit", "pages", [](Problem& p) { p.return_max_logit = true; }},
    {"mass_of_latent_keys", "return_key_mass", "latent",
     [](Problem& p) {
       p = good();
       p.latent = p.return_key_mass = true, p.head_dim = 16, p.head_dim_v = 8;
     }},
    {"entropy_of_codes", "return_entropy", "8 bits",
     [](Problem& p) {
       p = good();
       p.kv_dtype = Dtype::int8, p.return_entropy = true;
     }},
    {"latent_value_too_wide", "head_dim_v", "520",
     [](Problem& p) { p.latent = true, p.head_dim = 576, p.head_dim_v = 520; }},
};

INSTANTIATE_TEST_SUITE_P(Contract, CacheRefusal, ::testing::ValuesIn(cache_refusals),
                         [](const auto& param) { return param.param.name; });

TEST(CacheRefusal, OnlyForwardReadsACache) {
  Problem padded = good();
  padded.left_padding = true;
  Problem latent = good();
  latent.latent = true, latent.head_dim_v = 8, latent.head_dim = 16;
  for (const Pass pass : {Pass::backward, Pass::standard_forward, Pass::standard_backward}) {
    expect_refused([&] { make_plan(good_pages(), pass, laptop); }, "page_size", "4");
    expect_refused([&] { make_plan(padded, pass, laptop); }, "left_padding", "1");
    expect_refused([&] { make_plan(latent, pass, laptop); }, "latent", "1");
  }
}

TEST(NarrowQueryRefusal, NamesArgumentAndValue) {
  const auto narrow = [] {
    Problem p = good();
    p.q_dtype = p.kv_dtype = Dtype::float8_e4m3;
    return p;
  };
  const auto refused = [&](const char* argument, const char* value, auto breaks, Pass pass = Pass::forward) {
    Problem p = narrow();
    breaks(p);
    expect_refused([&] { make_plan(p, pass, laptop); }, argument, value);
  };
  EXPECT_NO_THROW(make_plan(narrow(), Pass::forward, laptop));
  refused("q_dtype", "int8", [](Problem& p) { p.q_dtype = p.kv_dtype = Dtype::int8; });
  refused("q_dtype", "float8_e4m3", [](Problem& p) { p.kv_dtype = Dtype::float8_e5m2; });
  refused("q_dtype", "float8_e4m3", [](Problem& p) { p.kv_dtype.reset(); });
  refused("q_scales", "3", [](Problem& p) { p.q_scales = ScaleKind::token; });
  refused("q_scales", "tensor", [](Problem& p) { p.q_dtype.reset(), p.q_scales = ScaleKind::tensor; });
  refused(
      "kv_dtype", "float8_e4m3", [](Problem&) {}, Pass::backward);
}

TEST(GroupRefusal, NamesArgumentAndValue) {
  const auto refused = [](const char* argument, const char* value, auto breaks, Pass pass = Pass::forward) {
    Problem p = good();
    p.head_dim = 64, p.kv_dtype = Dtype::nvfp4;
    breaks(p);
    expect_refused([&] { make_plan(p, pass, laptop); }, argument, value);
  };
  refused("kv_group", "32", [](Problem& p) { p.kv_group = 32; });
  refused("kv_group", "48", [](Problem& p) { p.kv_dtype = Dtype::int4, p.kv_group = 48, p.head_dim = 96; });
  refused("kv_group", "16", [](Problem& p) { p.kv_dtype = Dtype::int8, p.kv_group = 16; });
  refused("head_dim", "40", [](Problem& p) { p.head_dim = 40; });
  refused("head_dim_v", "72", [](Problem& p) { p.head_dim_v = 72; });
  refused("kv_scales", "head", [](Problem& p) { p.kv_scales = ScaleKind::head; });
  refused("kv_scales", "tensor", [](Problem& p) { p.kv_dtype = Dtype::mxfp4, p.kv_scales = ScaleKind::tensor; });
  refused("kv_dtype", "nvfp4", [](Problem& p) { p.invariant = true; });
  refused("kv_dtype", "nvfp4", [](Problem& p) { p.latent = true, p.head_dim_v = 32; });
  refused("q_dtype", "float8_e4m3", [](Problem& p) { p.q_dtype = Dtype::float8_e4m3; });
  refused("return_entropy", "true", [](Problem& p) { p.return_entropy = true; });
  for (const Pass pass : {Pass::backward, Pass::standard_forward, Pass::tangent, Pass::second})
    refused(
        "kv_dtype", "nvfp4", [](Problem&) {}, pass);
  Problem p = good();
  p.head_dim = 64, p.kv_dtype = Dtype::int4;
  EXPECT_NO_THROW(make_plan(p, Pass::forward, laptop));
}

TEST(ProgramRefusal, GradientsOfAMask) {
  Problem p = good();
  p.program = "t0 = tensor float32 1\nx = load t0 h\nv = gt x 0.0\nvisible = v";
  p.program_sizes[0] = {p.heads_q};
  make_plan(p, Pass::backward, laptop);
  p.program_gradients = 1;
  expect_refused([&] { make_plan(p, Pass::backward, laptop); }, "program_gradients", "1");
}

TEST(PlanRefusal, UnknownKernelListsThoseThatExist) {
  try {
    make_plan(good(), Pass::forward, laptop, "forward/warp_drive");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("forward/warp_drive"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("there are: cpu/"), std::string::npos) << error.what();
  }
}

/// A case whose buffers are all in order, to break one at a time.
class BufferRefusal : public ::testing::Test {
 protected:
  BufferRefusal() {
    case_.name = "refusal";
    case_.problem = good();
  }
  void start() {
    in_ = draw_inputs(case_);
    memory_ = memory_of({});
    tensors_ = std::make_unique<Tensors>(case_, in_, *memory_);
  }
  Buffers forward_buffers() {
    Buffers b = tensors_->buffers();
    b.dout = nullptr, b.dlse = nullptr, b.dq = b.dk = b.dv = b.dbias = nullptr, b.dsink = nullptr;
    return b;
  }
  void expect(const std::string& argument, const std::string& value, const Buffers& b, const Options& options = {}) {
    expect_refused([&] { forward(case_.problem, b, options); }, argument, value);
    for (double x : tensors_->read(false).out) ASSERT_TRUE(std::isnan(x)) << "an output was written";
  }

  Case case_;
  Inputs in_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Tensors> tensors_;
};

TEST_F(BufferRefusal, NullPointers) {
  start();
  const std::pair<const char*, void (*)(Buffers&)> nulls[] = {{"q", [](Buffers& b) { b.q = nullptr; }},
                                                              {"k", [](Buffers& b) { b.k = nullptr; }},
                                                              {"v", [](Buffers& b) { b.v = nullptr; }},
                                                              {"out", [](Buffers& b) { b.out = nullptr; }}};
  for (const auto& [argument, breaks] : nulls) {
    Buffers b = forward_buffers();
    breaks(b);
    expect(argument, "null", b);
  }
}

TEST_F(BufferRefusal, MisalignedPointer) {
  start();
  Buffers b = forward_buffers();
  b.k = static_cast<const char*>(b.k) + 1;
  expect("k", "aligned to 4", b);
}

TEST_F(BufferRefusal, PointerWithoutItsOption) {
  start();
  Buffers b = forward_buffers();
  const float slopes[4] = {};
  b.alibi_slopes = slopes;
  expect("alibi_slopes", "set alibi", b);
}

TEST_F(BufferRefusal, OptionWithoutItsPointer) {
  case_.problem.sink = true;
  start();
  Buffers b = forward_buffers();
  b.sink = nullptr;
  expect("sink", "null", b);
}

TEST_F(BufferRefusal, OutputOverInput) {
  start();
  Buffers b = forward_buffers();
  b.q = b.out;
  expect("out", "shared with q", b);
}

TEST_F(BufferRefusal, EveryOutputIsItsOwnMemory) {
  case_.problem.sink = case_.dsink = case_.dlse = case_.dbias = true;
  case_.problem.bias = {.present = true, .q_stride = case_.problem.seq_kv};
  start();
  const std::size_t needed = workspace_bytes(case_.problem, Pass::standard_backward);
  void* workspace = memory_->allocate(needed);
  struct Shared {
    const char *argument, *value;
    void (*share)(Buffers&, void* workspace);
  };
  const Shared shared[] = {
      {"dq", "shared with dlse", [](Buffers& b, void*) { b.dlse = static_cast<const float*>(b.dq); }},
      {"dv", "shared with bias", [](Buffers& b, void*) { b.bias = b.dv; }},
      {"dbias", "shared with k", [](Buffers& b, void*) { b.dbias = const_cast<void*>(b.k); }},
      {"dsink", "shared with dk", [](Buffers& b, void*) { b.dsink = static_cast<float*>(b.dk); }},
      {"workspace", "shared with q", [](Buffers& b, void* scratch) { b.q = scratch; }},
      {"workspace", "shared with dq", [](Buffers& b, void* scratch) { b.dq = scratch; }},
  };
  for (const auto& [argument, value, share] : shared) {
    Buffers b = tensors_->buffers();
    share(b, workspace);
    expect_refused([&] { standard_backward(case_.problem, b, {.workspace = workspace, .workspace_bytes = needed}); },
                   argument, value);
  }
}

/// Slopes, the sink and lengths are inputs like any other: here lse, and then dq, would be written over each of them.
TEST_F(BufferRefusal, SmallInputsUnderAnOutput) {
  Problem& p = case_.problem;
  p.packed = true, p.total_q = 10, p.total_kv = 14;
  case_.cu_seqlens_q = {0, 5, 10}, case_.cu_seqlens_kv = {0, 7, 14};
  p.alibi = p.sink = p.seqused_q = p.seqused_kv = p.key_lengths = true;
  case_.seqused_q = {5, 4}, case_.seqused_kv = {6, 7}, case_.key_lengths = {3, 7};
  start();
  struct Input {
    const char* name;
    const void* (*data)(const Buffers&);
  };
  const Input inputs[] = {
      {"alibi_slopes", [](const Buffers& b) -> const void* { return b.alibi_slopes; }},
      {"sink", [](const Buffers& b) -> const void* { return b.sink; }},
      {"cu_seqlens_q", [](const Buffers& b) -> const void* { return b.cu_seqlens_q; }},
      {"cu_seqlens_kv", [](const Buffers& b) -> const void* { return b.cu_seqlens_kv; }},
      {"seqused_q", [](const Buffers& b) -> const void* { return b.seqused_q; }},
      {"seqused_kv", [](const Buffers& b) -> const void* { return b.seqused_kv; }},
      {"key_lengths", [](const Buffers& b) -> const void* { return b.key_lengths; }},
  };
  const std::size_t needed = workspace_bytes(p, Pass::standard_backward);
  void* workspace = memory_->allocate(needed);
  for (const Input& input : inputs) {
    const std::string shared = std::string("shared with ") + input.name;
    Buffers b = forward_buffers();
    // The last element of lse is the first of the input.
    b.lse = static_cast<float*>(const_cast<void*>(input.data(b))) - (p.total_q * p.heads_q - 1);
    expect("lse", shared, b);
    b = tensors_->buffers();
    b.dq = const_cast<void*>(input.data(b));
    expect_refused([&] { standard_backward(p, b, {.workspace = workspace, .workspace_bytes = needed}); }, "dq", shared);
  }
}

TEST_F(BufferRefusal, SlopesOfEverySequenceCount) {
  Problem& p = case_.problem;
  p.alibi = true, p.alibi_batch_stride = 100;
  start();
  std::vector<float> slopes(200, 0.5f);
  Buffers b = forward_buffers();
  b.alibi_slopes = slopes.data();
  b.lse = slopes.data() + 100;  // those of the second sequence
  expect("lse", "shared with alibi_slopes", b);
  b.lse = slopes.data() + p.heads_q;  // between the two
  forward(p, b);
}

/// Keys that run backwards lie before their pointer.
TEST_F(BufferRefusal, OutputOverKeysThatRunBackwards) {
  Problem& p = case_.problem;
  start();
  std::vector<float> keys(4096, 1.0f);
  const std::int64_t row = p.heads_kv * p.head_dim;
  p.k_strides = {p.seq_kv * row, -row, p.head_dim};
  Buffers b = forward_buffers();
  b.k = keys.data() + 1024;
  for (const std::int64_t back : {std::int64_t{1}, p.seq_kv - 1}) {
    b.out = keys.data() + 1024 - back * row;
    expect("out", "shared with k", b);
  }
}

TEST_F(BufferRefusal, PackedLengthsPastTheSequence) {
  Problem& p = case_.problem;
  p.packed = true, p.total_q = 10, p.total_kv = 14;
  case_.cu_seqlens_q = {0, 4, 10}, case_.cu_seqlens_kv = {0, 5, 14};
  p.seq_q = 6, p.seq_kv = 9;
  p.key_lengths = p.seqused_q = p.seqused_kv = true;
  case_.key_lengths = {5, 9}, case_.seqused_q = {4, 6}, case_.seqused_kv = {5, 9};
  start();
  const std::int32_t keys[] = {6, 9}, queries[] = {5, 6};  // longer than the first sequence, shorter than the longest
  Buffers b = forward_buffers();
  b.key_lengths = keys;
  expect("key_lengths[0]", "6; allowed are 0 to 5", b);
  b = forward_buffers();
  b.seqused_kv = keys;
  expect("seqused_kv[0]", "6; allowed are 0 to 5", b);
  b = forward_buffers();
  b.seqused_q = queries;
  expect("seqused_q[0]", "5; allowed are 0 to 4", b);
}

TEST_F(BufferRefusal, StreamOnTheCpu) {
  start();
  int stream;
  expect("stream", "cpu", forward_buffers(), {.stream = &stream});
}

TEST_F(BufferRefusal, PackedLengths) {
  case_.problem.packed = true;
  case_.problem.total_q = 10, case_.problem.total_kv = 14;
  case_.cu_seqlens_q = {0, 5, 10}, case_.cu_seqlens_kv = {0, 7, 14};
  start();
  const std::pair<const char*, std::vector<std::int32_t>> bad[] = {{"cu_seqlens_q[0]", {1, 5, 10}},
                                                                   {"cu_seqlens_q[2]", {0, 5, 4}},
                                                                   {"cu_seqlens_q[1]", {0, 6, 10}},
                                                                   {"cu_seqlens_q[1]", {0, -3, 2}}};
  for (const auto& [argument, lengths] : bad) {
    Buffers b = forward_buffers();
    b.cu_seqlens_q = lengths.data();
    expect(argument, ";", b);
  }
}

TEST_F(BufferRefusal, PackedBeyondTheTensor) {
  case_.problem.packed = true;
  case_.problem.total_q = 9, case_.problem.total_kv = 14;
  case_.cu_seqlens_q = {0, 5, 9}, case_.cu_seqlens_kv = {0, 7, 14};
  start();
  const std::int32_t beyond[] = {0, 5, 10};
  Buffers b = forward_buffers();
  b.cu_seqlens_q = beyond;
  expect("cu_seqlens_q[2]", "9 rows", b);
}

TEST(Normalise, ABoundBeyondTheTensorIsTheTensor) {
  const Problem problem{.batch = 2,
                        .seq_q = 50,
                        .seq_kv = 60,
                        .heads_q = 2,
                        .heads_kv = 2,
                        .head_dim = 16,
                        .packed = true,
                        .total_q = 9,
                        .total_kv = 14};
  EXPECT_EQ(api::normalise(problem, Pass::forward).seq_q, 9);
  EXPECT_EQ(api::normalise(problem, Pass::forward).seq_kv, 14);
}

TEST_F(BufferRefusal, PageTable) {
  case_.problem = good_pages();
  case_.seqused_kv = {7, 3};
  case_.page_table = {5, 19, -1, 0, -1, 99};  // past the lengths it may hold anything
  start();
  forward(case_.problem, forward_buffers());
  start();
  Buffers b = forward_buffers();
  b.page_table = nullptr;
  expect("page_table", "null", b);
  const std::pair<const char*, std::vector<std::int32_t>> bad[] = {{"page_table[0][1]", {5, 20, -1, 0, -1, 99}},
                                                                   {"page_table[0][0]", {-1, 19, -1, 0, -1, 99}},
                                                                   {"page_table[1][0]", {5, 19, -1, 77, -1, 99}}};
  for (const auto& [argument, table] : bad) {
    b.page_table = table.data();
    expect(argument, "0 to 19", b);
  }
  b = forward_buffers();
  b.out = const_cast<std::int32_t*>(b.page_table);
  expect("out", "page_table", b);
}

/// A cache of keys though nobody asks: what has a number for each sequence has none.
TEST_F(BufferRefusal, ScalesOfNoSequenceMayBeNull) {
  case_.problem = good_pages();
  Problem& p = case_.problem;
  p.batch = 0, p.q_dtype = p.kv_dtype = Dtype::float8_e4m3, p.q_scales = p.kv_scales = ScaleKind::head;
  start();
  Buffers b = forward_buffers();
  b.q_scale = b.k_scale = b.v_scale = nullptr;
  EXPECT_NO_THROW(forward(p, b));
  p.kv_scales = ScaleKind::tensor;
  expect("k_scale", "null", b);
}

TEST_F(BufferRefusal, PagesAndPaddingThatTheProblemDoesNotHave) {
  start();
  const std::int32_t numbers[] = {0, 0};
  Buffers b = forward_buffers();
  b.page_table = numbers;
  expect("page_table", "page_size", b);
  b = forward_buffers();
  b.left_padding = numbers;
  expect("left_padding", "left_padding", b);
}

TEST_F(BufferRefusal, LeftPaddingOutOfRange) {
  case_.problem.left_padding = true;
  case_.left_padding = {3, 7};
  start();
  const std::int32_t bad[] = {-1, 7};
  Buffers b = forward_buffers();
  b.left_padding = bad;
  expect("left_padding[0]", "-1", b);
}

TEST_F(BufferRefusal, LengthsOutOfRange) {
  case_.problem.key_lengths = true;
  case_.key_lengths = {3, 7};
  start();
  const std::int32_t bad[] = {3, 8};
  Buffers b = forward_buffers();
  b.key_lengths = bad;
  expect("key_lengths[1]", "8", b);
}

TEST_F(BufferRefusal, WorkspaceTooSmall) {
  start();
  const std::size_t needed = workspace_bytes(case_.problem, Pass::standard_forward);
  ASSERT_GT(needed, 0u);
  std::vector<char> small(needed);
  expect_refused(
      [&] {
        standard_forward(case_.problem, forward_buffers(), {.workspace = small.data(), .workspace_bytes = needed - 1});
      },
      "workspace_bytes", std::to_string(needed));
}

TEST_F(BufferRefusal, GradientOfWhatIsNotThere) {
  start();
  Buffers b = tensors_->buffers();
  float dsink[4];
  b.dsink = dsink;
  expect_refused([&] { backward(case_.problem, b); }, "dsink", "no sink");
}

TEST(Device, ParsesWhatItPrints) {
  for (const char* text : {"cpu", "cuda:0", "cuda:3", "emulator:sm_80", "emulator:sm_89", "emulator:sm_90"})
    EXPECT_EQ(to_string(parse_device(text)), text);
  for (const char* text : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "emulator:sm_75", "cpu:1"}) {
    expect_refused([&] { parse_device(text); }, "device", text);
  }
}

}  // namespace
}  // namespace flash_attention::testing
