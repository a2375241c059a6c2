#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "flash_attention/attention.h"
#include "fuzz/bytes.h"

namespace flash_attention::fuzz {

/// A problem with any numbers in it: most are refused, some are valid and huge.
inline Problem wild_problem(Bytes& bytes) {
  Problem p;
  const auto sometimes_wild = [&](std::int64_t usual) { return bytes.very_rarely() ? bytes.wild() : usual; };
  const auto strides = [&] { return bytes.very_rarely() ? Strides{bytes.wild(), bytes.wild(), bytes.wild()} : Strides{}; };
  const auto number = [&](float usual) {
    if (!bytes.very_rarely()) return usual;
    constexpr float numbers[] = {-1, 0, 1, 1e-40f, 1e38f, INFINITY, -INFINITY, NAN};
    return numbers[bytes.byte() % 8];
  };
  const auto score_tensor = [&] {
    ScoreTensor tensor;
    tensor.present = bytes.very_rarely();
    if (tensor.present) tensor = {true, static_cast<Dtype>(bytes.byte() % 4), bytes.wild(), bytes.wild(), bytes.wild()};
    return tensor;
  };
  p.batch = sometimes_wild(bytes.between(0, 5));
  p.seq_q = sometimes_wild(bytes.between(0, 300));
  p.seq_kv = sometimes_wild(bytes.between(0, 300));
  p.heads_kv = sometimes_wild(bytes.between(1, 4));
  p.heads_q = sometimes_wild(p.heads_kv > 0 && p.heads_kv < 1000 ? p.heads_kv * bytes.between(1, 4) : 1);
  p.head_dim = sometimes_wild(8 * bytes.between(1, 32));
  p.head_dim_v = sometimes_wild(bytes.flip() ? 0 : 8 * bytes.between(1, 32));
  p.dtype = static_cast<Dtype>(bytes.very_rarely() ? bytes.byte() : bytes.byte() % 3);
  p.packed = bytes.very_rarely();
  if (p.packed) p.total_q = bytes.wild(), p.total_kv = bytes.wild();
  for (Strides* s : {&p.q_strides, &p.k_strides, &p.v_strides, &p.out_strides, &p.dout_strides, &p.dq_strides})
    *s = strides();
  if (bytes.very_rarely()) p.scale = number(1);
  p.softcap = number(0);
  p.bias = score_tensor();
  p.mask = score_tensor();
  p.alibi = bytes.very_rarely();
  p.alibi_batch_stride = sometimes_wild(0);
  p.causal = bytes.flip();
  p.alignment = static_cast<Alignment>(bytes.very_rarely() ? bytes.byte() : 0);
  p.window_left = sometimes_wild(-1);
  p.window_right = sometimes_wild(-1);
  p.attention_chunk = sometimes_wild(0);
  p.precision = static_cast<Precision>(bytes.very_rarely() ? bytes.byte() : bytes.between(0, 3));
  p.key_lengths = bytes.very_rarely();
  p.seqused_q = bytes.very_rarely();
  p.seqused_kv = bytes.very_rarely();
  p.left_padding = bytes.very_rarely();
  if (bytes.very_rarely()) {
    p.page_size = sometimes_wild(bytes.between(1, 64));
    p.num_pages = sometimes_wild(bytes.between(0, 30));
    p.page_table_stride = sometimes_wild(bytes.between(0, 10));
  }
  p.sink = bytes.very_rarely();
  p.dropout_p = number(0);
  p.deterministic = bytes.flip();
  return p;
}

/// Devices to plan for; none of them needs to be here.
inline DeviceInfo some_device(Bytes& bytes) {
  DeviceInfo info;
  if (bytes.flip()) {
    info.isa = static_cast<CpuIsa>(bytes.byte() % 5);
    info.threads = static_cast<int>(bytes.between(1, 256));
    return info;
  }
  info.device.kind = DeviceKind::cuda;
  info.arch = bytes.flip() ? 90 : 80;
  info.num_sms = static_cast<int>(bytes.between(1, 200));
  info.shared_bytes = info.arch == 90 ? 232448 : 166912;
  info.l2_bytes = 50 << 20;
  info.memory_bytes = std::int64_t{80} << 30;
  return info;
}

/// True where the library took the problem; false where it refused it with an Error, as it may.
inline bool plan_wildly(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  const Pass pass = static_cast<Pass>(bytes.byte() % 4);
  const DeviceInfo device = some_device(bytes);
  const Problem problem = wild_problem(bytes);
  try {
    const Plan plan = make_plan(problem, pass, device);
    EXPECT_FALSE(plan.kernel.empty());
    EXPECT_EQ(plan, make_plan(problem, pass, device)) << "planning is a pure function";
    for (const Launch& launch : plan.launches) {
      for (const int blocks : launch.grid) EXPECT_GT(blocks, 0) << to_string(problem);
      EXPECT_TRUE(launch.block > 0 && launch.block <= 1024) << to_string(problem);
      EXPECT_LE(launch.shared_bytes, device.shared_bytes) << to_string(problem);
    }
    EXPECT_GE(flops(problem, pass), 0) << to_string(problem);
    hash_value(problem);
    return true;
  } catch (const Error& error) {
    EXPECT_NE(error.code(), ErrorCode::internal) << error.what() << "\n" << to_string(problem);
    EXPECT_NE(std::string(error.what()), "");
    return false;
  }
}

/// A call without memory behind it must be refused before anything is touched, unless there is nothing to compute.
inline void call_without_memory(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  const Pass pass = static_cast<Pass>(bytes.byte() % 4);
  const Problem problem = wild_problem(bytes);
  try {
    if (pass == Pass::forward) forward(problem, {});
    if (pass == Pass::backward) backward(problem, {});
    if (pass == Pass::standard_forward) standard_forward(problem, {});
    if (pass == Pass::standard_backward) standard_backward(problem, {});
    const bool nothing = problem.batch == 0 || (problem.packed ? problem.total_q == 0 : problem.seq_q == 0);
    EXPECT_TRUE(nothing) << to_string(problem);
  } catch (const Error& error) {
    EXPECT_NE(error.code(), ErrorCode::internal) << error.what() << "\n" << to_string(problem);
  }
}

}  // namespace flash_attention::fuzz
