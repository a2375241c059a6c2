#include <gtest/gtest.h>

#include <algorithm>

#include "emulator/checks/counters.h"
#include "emulator/emulate.h"
#include "emulator/wrapper_cases.h"

namespace flash_attention::testing {
namespace {

emulator::Counters count(const WrapperCase& c, std::uint64_t seed = 0) {
  const bool before = emulator::count_accesses(true);
  emulator::reset_counters();
  emulate(c, seed);
  emulator::count_accesses(before);
  return emulator::counters();
}

/// One warp, one instruction.
WrapperCase warp_case(const std::string& name, const std::string& body) {
  return {.name = "counters_" + name,
          .headers = {"memory", "matrix"},
          .storage = "  alignas(128) unsigned char bytes[32768];",
          .body = "  const unsigned base = ptx::shared_address(shared.bytes);\n" + body,
          .shape = {.block = 32},
          .input = Bytes(8192),
          .expected = Bytes(64)};
}

struct Shared {
  std::string name, address;
  int bytes;
  std::uint64_t wavefronts, ideal;
};

TEST(Counters, SharedWavefronts) {
  const Shared accesses[] = {
      {"neighbours", "thread * 4", 4, 1, 1},
      {"the_same_word", "64", 4, 1, 1},
      {"every_second_word", "thread * 8", 4, 2, 1},
      {"one_bank", "thread * 128", 4, 32, 1},
      {"odd_stride", "thread * 132", 4, 1, 1},
      {"16_bits", "thread * 2", 2, 1, 1},
      {"8_bytes", "thread * 8", 8, 2, 2},
      {"16_bytes", "thread * 16", 16, 4, 4},
      {"16_bytes_in_rows", "thread * 128", 16, 32, 4},
      {"16_bytes_swizzled", "thread * 128 + ((thread % 8) * 16)", 16, 4, 4},
  };
  for (const Shared& access : accesses) {
    const std::string type =
        access.bytes == 2 ? "unsigned short" : "ptx::Vector<float, " + std::to_string(access.bytes / 4) + ">";
    for (const std::uint64_t seed : {0, 5}) {
      const auto stored = count(
          warp_case("store_" + access.name, "  ptx::store_shared<" + type + ">(base + " + access.address + ", {});"), seed);
      EXPECT_EQ(stored.shared_requests, 1u) << access.name;
      EXPECT_EQ(stored.shared_wavefronts, access.wavefronts) << access.name;
      EXPECT_EQ(stored.shared_wavefronts_ideal, access.ideal) << access.name;
    }
  }
}

TEST(Counters, LoopsAndDivergence) {
  // Ten rounds of a load that only half of the lanes execute, all into one bank: 16 passes each.
  const auto counters =
      count(warp_case("half_a_warp",
                      "  for (int i = 0; i < 10; ++i) {\n"
                      "    if (thread % 2 == 0) output[0] += ptx::load_shared<unsigned>(base + thread * 128) == 7;\n"
                      "    __syncwarp();\n  }"));
  EXPECT_EQ(counters.shared_requests, 10u);
  EXPECT_EQ(counters.shared_wavefronts, 160u);
}

TEST(Counters, Ldmatrix) {
  const auto rows = [](const char* name, const char* stride) {
    return count(
        warp_case(name, std::string("  unsigned tiles[4];\n  ptx::ldmatrix_x4(tiles, base + thread * ") + stride + ");"));
  };
  const auto dense = rows("ldmatrix_dense", "16");
  EXPECT_EQ(dense.shared_requests, 1u);
  EXPECT_EQ(dense.shared_wavefronts, 4u);
  EXPECT_EQ(rows("ldmatrix_rows", "128").shared_wavefronts, 32u);
  EXPECT_EQ(rows("ldmatrix_padded", "144").shared_wavefronts, 4u);
}

/// Lanes are served by their numbers, also where they come one after the other in another order.
TEST(Counters, LanesInTheirOrder) {
  const std::string body =
      "  for (int i = 0; i < int(31 - thread); ++i) ptx::load_global((const float*)input + i);\n"
      "  ptx::store_shared<ptx::Vector<float, 4>>(base + thread * 16, {});";
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    EXPECT_EQ(count(warp_case("lanes_in_their_order", body), seed).shared_wavefronts, 4u) << seed;
  }
}

/// Loads are ldmatrix, stores 8 bytes a lane.
TEST(Counters, Wmma) {
  const auto counted = [](const std::string& name, const std::string& body) {
    WrapperCase c = warp_case(name, "  ptx::WmmaOperand<abi::Type::bfloat16> A;\n  ptx::WmmaAccumulator D{};\n" + body);
    c.headers.push_back("wmma");
    return count(c);
  };
  EXPECT_EQ(counted("wmma_load_rows", "  ptx::wmma_load_a<abi::Type::bfloat16>(A, base, 64);").shared_wavefronts, 32u);
  EXPECT_EQ(counted("wmma_load_padded", "  ptx::wmma_load_a<abi::Type::bfloat16>(A, base, 72);").shared_wavefronts, 4u);
  EXPECT_EQ(counted("wmma_store_rows", "  ptx::wmma_store(base, D, 32);").shared_wavefronts, 4u * 2 * 4);
  EXPECT_EQ(counted("wmma_store_padded", "  ptx::wmma_store(base, D, 40);").shared_wavefronts, 4u * 2);
}

TEST(Counters, Fma) {
  WrapperCase c = warp_case("fma", "  for (int i = 0; i < 5; ++i) output[0] += ptx::fma(2, 3, float(i)) == 7;");
  c.headers.push_back("math");
  EXPECT_EQ(count(c).fma_flops, 32u * 5 * 2);
}

TEST(Counters, GlobalSectors) {
  const auto sectors = [](const char* name, const std::string& body) {
    const auto counters = count(warp_case(name, body));
    EXPECT_EQ(counters.global_requests, 1u) << name;
    return counters.global_sectors;
  };
  EXPECT_EQ(sectors("global_neighbours", "  ptx::load_global((const float*)input + thread);"), 4u);
  EXPECT_EQ(sectors("global_apart", "  ptx::load_global((const float*)input + thread * 8);"), 32u);
  EXPECT_EQ(sectors("global_vectors", "  ptx::load_readonly((const ptx::Vector<float, 4>*)input + thread);"), 16u);
  EXPECT_EQ(sectors("global_one", "  ptx::load_global((const float*)input);"), 1u);
  EXPECT_EQ(sectors("global_shifted", "  ptx::load_global((const float*)input + thread + 1);"), 5u);
}

TEST(Counters, ProductsAndBarriers) {
  const WrapperCases& all = wrapper_cases();
  const auto named = [&](const std::string& name) {
    return *std::find_if(all.begin(), all.end(), [&](const WrapperCase& c) { return c.name == name; });
  };
  EXPECT_EQ(count(named("mma_m16n8k16_bfloat16")).mma_flops, 2u * 16 * 8 * 16);
  EXPECT_EQ(count(named("mma_m16n8k8_tf32")).mma_flops, 2u * 16 * 8 * 8);
  EXPECT_EQ(count(named("wmma_float16")).mma_flops, 2u * 16 * 16 * 16);
  EXPECT_EQ(count(named("wgmma_bfloat16_n80_ss_128")).wgmma_flops, 2u * 64 * 80 * 64);
  const auto groups = count(named("wgmma_groups"));
  EXPECT_EQ(groups.wgmma_flops, 3u * 2 * 64 * 64 * 16);
  EXPECT_EQ(groups.barrier_waits, 4u);
  EXPECT_EQ(groups.blocks, 1u);
  EXPECT_EQ(groups.threads, 128u);
  EXPECT_EQ(count(named("bulk_load")).bulk_bytes, 4096u);
  EXPECT_EQ(count(named("bulk_load")).mbarrier_waits, 64u);
  EXPECT_EQ(count(named("syncthreads")).barrier_waits, 8u * 7);
}

}  // namespace
}  // namespace flash_attention::testing
