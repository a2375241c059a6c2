#include "launch/tensor_maps.h"

#include <gtest/gtest.h>

#include "api/checks/validate.h"

namespace flash_attention {
namespace {

constexpr std::int64_t beyond_32_bits = (std::int64_t{1} << 33) + 16;

struct Expected {
  const void* data;
  const Strides& strides;
  std::int64_t dim, rows, heads, batch;
};

void expect_map(const launch::TensorMapSpec& map, const Expected& wanted) {
  EXPECT_EQ(map.data, wanted.data);
  EXPECT_EQ(map.rank, 4);
  const std::int64_t sizes[4] = {wanted.dim, wanted.rows, wanted.heads, wanted.batch};
  const std::int64_t strides[3] = {wanted.strides.seq, wanted.strides.head, wanted.strides.batch};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(map.sizes[i], static_cast<std::uint64_t>(sizes[i])) << map.slot << " " << i;
  for (int i = 0; i < 3; ++i) {
    const std::int64_t bytes = sizes[i + 1] == 1 ? 16 : 2 * strides[i];
    EXPECT_EQ(map.strides_bytes[i], static_cast<std::uint64_t>(bytes)) << map.slot << " " << i;
  }
}

TEST(Maps, EveryTensorHasItsOwnSizesAndStrides) {
  Problem p{.batch = 3,
            .seq_q = 300,
            .seq_kv = 500,
            .heads_q = 4,
            .heads_kv = 2,
            .head_dim = 64,
            .head_dim_v = 32,
            .dtype = Dtype::bfloat16};
  std::int64_t n = 0;
  for (Strides* s : {&p.q_strides, &p.k_strides, &p.v_strides, &p.out_strides, &p.dout_strides}) {
    n += 8;
    *s = {beyond_32_bits * 4 + n, 1024 + n, beyond_32_bits + n};
  }
  const DeviceInfo gpu{.device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = 132, .shared_bytes = 232448};
  const auto pointer = [](std::uintptr_t at) { return reinterpret_cast<void*>(at); };
  const Buffers b{
      .q = pointer(0x100), .k = pointer(0x200), .v = pointer(0x300), .out = pointer(0x400), .dout = pointer(0x500)};
  for (const bool packed : {false, true}) {
    p.packed = packed;
    p.total_q = packed ? 700 : 0, p.total_kv = packed ? 900 : 0;
    const std::int64_t rows_q = packed ? 700 : 300, rows_kv = packed ? 900 : 500, batch = packed ? 1 : 3;
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Problem whole = api::normalise(p, pass);
      const Plan plan = make_plan(p, pass, gpu, pass == Pass::forward ? "forward/sm90" : "backward/sm90");
      const launch::TensorMaps maps = launch::tensor_maps(plan, b, nullptr);
      ASSERT_EQ(maps.count, 4u);
      for (int i = 0; i < 4; ++i) EXPECT_EQ(maps.specs[i].slot, i);
      expect_map(maps.specs[0], {b.q, whole.q_strides, 64, rows_q, 4, batch});
      expect_map(maps.specs[1], {b.k, whole.k_strides, 64, rows_kv, 2, batch});
      expect_map(maps.specs[2], {b.v, whole.v_strides, 32, rows_kv, 2, batch});
      if (pass == Pass::forward) expect_map(maps.specs[3], {b.out, whole.out_strides, 32, rows_q, 4, batch});
      if (pass == Pass::backward) expect_map(maps.specs[3], {b.dout, whole.dout_strides, 32, rows_q, 4, batch});
    }
  }
}

/// V of wide heads and what gradients read by rows: a box has all chunks of 64 columns, or the half that a block of a
/// cluster loads; where a chunk is cut off, one.
TEST(Maps, WideHeadsHaveAllChunksInABox) {
  struct Wide {
    std::int64_t dim_v;
    TileSize tile;
    int rank;
    std::uint64_t chunks;       // of the tensor
    std::uint32_t rows, boxed;  // of a box; with rank 4 its third dimension is the head
  };
  const DeviceInfo gpu{.device = {.kind = DeviceKind::cuda}, .arch = 90, .num_sms = 132, .shared_bytes = 232448};
  const Buffers b{.v = reinterpret_cast<void*>(0x300)};
  for (const Wide& w :
       {Wide{512, {64, 128}, 5, 8, 16, 8}, Wide{512, {128, 128}, 5, 8, 16, 4}, Wide{320, {64, 128}, 5, 5, 16, 6},
        Wide{192, {128, 128}, 5, 3, 32, 2}, Wide{328, {64, 128}, 4, 3, 16, 1}}) {
    const Problem p = api::normalise({.batch = 2,
                                      .seq_q = 256,
                                      .seq_kv = 500,
                                      .heads_q = 3,
                                      .heads_kv = 3,
                                      .head_dim = 512,
                                      .head_dim_v = w.dim_v,
                                      .dtype = Dtype::bfloat16},
                                     Pass::forward);
    const Plan plan = make_plan(p, Pass::forward, gpu, "forward/sm90", w.tile);
    const launch::TensorMapSpec v = launch::tensor_maps(plan, b, nullptr).specs[2];
    EXPECT_EQ(v.rank, w.rank) << w.dim_v;
    EXPECT_EQ(v.sizes[2], w.chunks) << w.dim_v;  // with rank 4: heads
    EXPECT_EQ(v.box[1], w.rows) << w.dim_v;
    EXPECT_EQ(v.box[2], w.boxed) << w.dim_v;
    if (v.rank == 4) continue;
    EXPECT_EQ(v.sizes[0], 64u);
    const std::uint64_t strides[4] = {static_cast<std::uint64_t>(2 * p.v_strides.seq), 128,
                                      static_cast<std::uint64_t>(2 * p.v_strides.head),
                                      static_cast<std::uint64_t>(2 * p.v_strides.batch)};
    for (int i = 0; i < 4; ++i) EXPECT_EQ(v.strides_bytes[i], strides[i]) << w.dim_v << " " << i;
  }
}

}  // namespace
}  // namespace flash_attention
