// What a problem says reaches the kernels' arguments whole: in 64 bits, and each in its own place.
#include "launch/arguments.h"

#include <gtest/gtest.h>

#include "api/checks/validate.h"

namespace flash_attention {
namespace {

constexpr std::int64_t far = (std::int64_t{1} << 33) + 1;  // what 32 bits would make 1

/// Every stride is another number above 2^33.
Problem far_apart() {
  Problem p{.batch = 3, .seq_q = 7, .seq_kv = 9, .heads_q = 4, .heads_kv = 2, .head_dim = 16, .head_dim_v = 8};
  std::int64_t n = 0;
  const auto next = [&] { return far + 16 * ++n; };
  for (Strides* s : {&p.q_strides, &p.k_strides, &p.v_strides, &p.out_strides, &p.dout_strides, &p.dq_strides,
                     &p.dk_strides, &p.dv_strides}) {
    *s = {next(), next(), next()};
  }
  for (ScoreTensor* t : {&p.bias, &p.mask}) *t = {true, Dtype::float32, next(), next(), next()};
  p.alibi = true, p.alibi_batch_stride = next();
  return p;
}

TEST(Arguments, StridesKeepTheir64Bits) {
  const Problem p = far_apart();
  Plan plan;
  for (std::size_t i = 0; i < plan.workspace_offsets.size(); ++i) plan.workspace_offsets[i] = far + 1000 + i;
  Problem with_scale = p;
  with_scale.scale = 1.0f;
  const abi::AttentionArgs args = launch::make_arguments(with_scale, plan, {}, {});
  const auto expect = [](const abi::TensorView& view, const Strides& strides) {
    EXPECT_EQ(view.batch_stride, strides.batch);
    EXPECT_EQ(view.seq_stride, strides.seq);
    EXPECT_EQ(view.head_stride, strides.head);
  };
  expect(args.Q, p.q_strides), expect(args.K, p.k_strides), expect(args.V, p.v_strides), expect(args.O, p.out_strides);
  expect(args.dO, p.dout_strides), expect(args.dQ, p.dq_strides), expect(args.dK, p.dk_strides);
  expect(args.dV, p.dv_strides);
  const auto expect_scores = [](const abi::ScoreView& view, const ScoreTensor& tensor) {
    EXPECT_EQ(view.batch_stride, tensor.batch_stride);
    EXPECT_EQ(view.head_stride, tensor.head_stride);
    EXPECT_EQ(view.q_stride, tensor.q_stride);
  };
  expect_scores(args.bias, p.bias), expect_scores(args.mask, p.mask);
  EXPECT_EQ(args.alibi_batch_stride, p.alibi_batch_stride);
  for (std::size_t i = 0; i < plan.workspace_offsets.size(); ++i) {
    EXPECT_EQ(args.workspace_offsets[i], far + 1000 + static_cast<std::int64_t>(i));
  }
}

/// The dense gradient of a bias has more than 2^31 elements in one head already.
TEST(Arguments, DbiasStridesKeepTheir64Bits) {
  Problem p{.batch = 3, .seq_q = 70000, .seq_kv = 90000, .heads_q = 4, .heads_kv = 4, .head_dim = 16, .head_dim_v = 16};
  p.scale = 1.0f;
  for (const bool of_batch : {false, true}) {
    for (const bool of_head : {false, true}) {
      for (const bool of_row : {false, true}) {
        p.bias = {true, Dtype::float32, of_batch ? far : 0, of_head ? far : 0, of_row ? far : 0};
        const abi::AttentionArgs args = launch::make_arguments(p, {}, {}, {});
        const std::int64_t rows = of_row ? p.seq_q : 1, heads = of_head ? p.heads_q : 1;
        EXPECT_EQ(args.dbias_q_stride, of_row ? p.seq_kv : 0);
        EXPECT_EQ(args.dbias_head_stride, of_head ? rows * p.seq_kv : 0);
        EXPECT_EQ(args.dbias_batch_stride, of_batch ? heads * rows * p.seq_kv : 0);
      }
    }
  }
}

TEST(Arguments, EveryPointerAndNumberIsInItsPlace) {
  Problem p{.batch = 3, .seq_q = 7, .seq_kv = 9, .heads_q = 6, .heads_kv = 2, .head_dim = 16, .head_dim_v = 8};
  p.total_q = 21, p.total_kv = 27, p.scale = 0.75f, p.softcap = 3, p.window_left = 5, p.window_right = 4;
  p.dropout_p = 0.25f;
  std::uintptr_t n = 0;
  const auto next = [&] { return reinterpret_cast<void*>(0x1000 * ++n); };
  Buffers b;
  b.q = next(), b.k = next(), b.v = next(), b.out = next(), b.bias = next(), b.dout = next();
  b.dq = next(), b.dk = next(), b.dv = next(), b.dbias = next();
  for (float** slot : {&b.lse, &b.dsink}) *slot = static_cast<float*>(next());
  for (const float** slot : {&b.alibi_slopes, &b.sink, &b.dlse}) *slot = static_cast<const float*>(next());
  b.mask = static_cast<const std::uint8_t*>(next());
  b.hidden_rows = static_cast<const std::int32_t*>(next());
  b.block_mask = static_cast<const std::uint8_t*>(next());
  for (const std::int32_t** slot : {&b.cu_seqlens_q, &b.cu_seqlens_kv, &b.seqused_q, &b.seqused_kv, &b.key_lengths}) {
    *slot = static_cast<const std::int32_t*>(next());
  }
  Options o;
  o.workspace = next(), o.seed = 0x0123456789abcdef, o.offset = 0xfedcba9876543210;
  o.repairs = static_cast<std::uint32_t*>(next());
  Plan plan;
  plan.num_splits = 11;
  const abi::AttentionArgs args = launch::make_arguments(p, plan, b, o);
  EXPECT_EQ(args.Q.data, b.q);
  EXPECT_EQ(args.K.data, b.k);
  EXPECT_EQ(args.V.data, b.v);
  EXPECT_EQ(args.O.data, b.out);
  EXPECT_EQ(args.dO.data, b.dout);
  EXPECT_EQ(args.dQ.data, b.dq);
  EXPECT_EQ(args.dK.data, b.dk);
  EXPECT_EQ(args.dV.data, b.dv);
  EXPECT_EQ(args.bias.data, b.bias);
  EXPECT_EQ(args.mask.data, b.mask);
  EXPECT_EQ(args.hidden_rows, b.hidden_rows);
  EXPECT_EQ(args.block_mask.data, b.block_mask);
  EXPECT_EQ(args.dbias, b.dbias);
  EXPECT_EQ(args.lse, b.lse);
  EXPECT_EQ(args.dlse, b.dlse);
  EXPECT_EQ(args.dsink, b.dsink);
  EXPECT_EQ(args.alibi_slopes, b.alibi_slopes);
  EXPECT_EQ(args.sink, b.sink);
  EXPECT_EQ(args.cu_seqlens_q, b.cu_seqlens_q);
  EXPECT_EQ(args.cu_seqlens_kv, b.cu_seqlens_kv);
  EXPECT_EQ(args.seqused_q, b.seqused_q);
  EXPECT_EQ(args.seqused_kv, b.seqused_kv);
  EXPECT_EQ(args.key_lengths, b.key_lengths);
  EXPECT_EQ(args.workspace, o.workspace);
  EXPECT_EQ(args.repairs, o.repairs);
  EXPECT_EQ(args.batch, 3);
  EXPECT_EQ(args.seq_q, 7);
  EXPECT_EQ(args.seq_kv, 9);
  EXPECT_EQ(args.heads_q, 6);
  EXPECT_EQ(args.heads_kv, 2);
  EXPECT_EQ(args.group, 3);
  EXPECT_EQ(args.total_q, 21);
  EXPECT_EQ(args.total_kv, 27);
  EXPECT_EQ(args.num_splits, 11);
  EXPECT_EQ(args.window_left, 5);
  EXPECT_EQ(args.window_right, 4);
  EXPECT_EQ(args.scale, 0.75f);
  EXPECT_EQ(args.softcap, 3.0f);
  EXPECT_EQ(args.seed, o.seed);
  EXPECT_EQ(args.offset, o.offset);
  EXPECT_EQ(args.drop_threshold, 1u << 30);
  EXPECT_EQ(args.keep_scale, 1.0f / 0.75f);
}

}  // namespace
}  // namespace flash_attention
