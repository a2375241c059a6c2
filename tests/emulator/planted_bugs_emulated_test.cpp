#include <gtest/gtest.h>

#include <algorithm>

#include "emulator/together.h"
#include "emulator/wrapper_cases.h"
#include "flash_attention/error.h"

// Kernels that are right, made wrong in one place: the emulator must notice, by an error or by wrong numbers, under one of
// a few seeds. The kernels themselves pass under all of them (wrappers_emulated_test).
namespace flash_attention::testing {
namespace {

constexpr std::uint64_t seeds = 16;

struct Bug {
  std::string name;
  std::string kernel;  // a case of wrapper_cases()
  std::string from, to;
  std::string message;  // part of the error; empty: wrong numbers will do
};

std::vector<Bug> bugs() {
  return {
      {"removed_barrier", "syncthreads", "(round + 1);\n    __syncthreads();", "(round + 1);", ""},
      {"slot_reused_before_all_have_read", "syncthreads", "[199 - thread];\n    __syncthreads();", "[199 - thread];", ""},
      {"removed_syncwarp", "syncwarp", "__syncwarp();", "", ""},
      {"barrier_that_one_warp_skips", "syncthreads", "__syncthreads();", "if (thread >= 32) __syncthreads();", "dead-lock"},
      {"barrier_for_too_few_threads", "named_barriers", "barrier_arrive(1, 128)", "barrier_arrive(1, 64)", "elsewhere"},
      {"barrier_for_too_many_threads", "named_barriers", "(2, 128)", "(2, 160)", "allowed are multiples of 32 up to 128"},
      {"producer_does_not_wait_for_consumer", "named_barriers", "if (round > 0) ptx::barrier_sync(2, 128);",
       "if (round > 0) ptx::barrier_arrive(2, 128);", ""},
      {"arrival_left_behind", "named_barriers", "if (round < 4) ", "", "ended with 64 of 128 threads at barrier 2"},
      {"diverged_lanes", "shuffle_xor", "ptx::shuffle_xor(value, 5)",
       "thread == 7 ? (__syncwarp(), 0) : ptx::shuffle_xor(value, 5)", "parted"},
      {"missing_lane", "shuffle_xor", "ptx::shuffle_xor(value, 5)", "thread == 7 ? 0 : ptx::shuffle_xor(value, 5)",
       "31 of 32"},

      {"copy_not_waited_for", "copy_async_16", "ptx::copy_async_wait<0>();", "", ""},
      {"copy_waited_for_one_group_too_late", "copy_async_groups", "copy_async_wait<1>", "copy_async_wait<2>", ""},
      {"copy_into_a_slot_still_read", "copy_async_groups", "[i % 3]", "[i % 2]", ""},
      {"copy_not_committed", "copy_async_groups", "ptx::copy_async_commit();", "", ""},
      {"copy_that_does_not_arrive", "copy_async_arrive", "ptx::copy_async_arrive(shared.full);",
       "ptx::mbarrier_arrive(shared.full);", ""},
      {"copy_arrives_and_is_not_awaited", "copy_async_arrive", "ptx::mbarrier_wait(shared.full, round % 2);", "", ""},
      {"copy_arrives_before_it_begins", "copy_async_arrive", "ptx::mbarrier_init(shared.full, 64)",
       "ptx::mbarrier_init(shared.full, 32)", ""},
      {"copy_misaligned", "copy_async_16", "input + thread * 16", "input + thread * 8", "not a multiple of 16"},
      {"load_misaligned", "load_global_b128", "(const T*)input", "(const T*)(input + 4)", "not a multiple of the 16 bytes"},
      {"shared_store_out_of_range", "load_global_b32", "base + (63 - thread)", "base + (63 - thread) * 20000",
       "outside the block's"},
      {"plain_store_past_shared_memory", "syncwarp",
       "shared.values[thread] =", "shared.values[thread * 1000] =", "of shared memory"},
      {"plain_store_through_null", "syncwarp", "shared.values[thread] = thread", "shared.values[thread] = *(int*)nullptr",
       "touched memory at"},
      {"endless_recursion", "syncwarp", "thread * thread",
       "[](auto self, int x) -> int { volatile char waste[4096]; waste[x & 1023] = 1; return x < 0 ? 0 : self(self, x + 1) "
       "+ waste[5]; }"
       "([](auto self, int x) -> int { volatile char waste[4096]; waste[x & 1023] = 1; return x < 0 ? 0 : self(self, x + "
       "1) + waste[5]; }, 1)",
       "is full"},

      {"mbarrier_not_initialised", "mbarrier_phases", "ptx::mbarrier_init(shared.empty, 1);", "", "was not initialised"},
      {"mbarrier_initialised_without_barrier", "mbarrier_phases", "__syncthreads();", "", ""},
      {"mbarrier_for_too_many_arrivals", "mbarrier_phases", "mbarrier_init(shared.full, 96)",
       "mbarrier_init(shared.full, 97)", "dead-lock"},
      {"mbarrier_wrong_parity", "mbarrier_phases", "mbarrier_wait(shared.full, round & 1)", "mbarrier_wait(shared.full, 1)",
       ""},
      {"mbarrier_slot_not_waited_for", "mbarrier_phases", "ptx::mbarrier_wait(shared.empty, (round & 1) ^ 1);", "", ""},

      {"mbarrier_tested_once", "mbarrier_test", "while (!ptx::mbarrier_test(shared.full, 0)) {}",
       "ptx::mbarrier_test(shared.full, 0);", ""},
      {"mbarrier_not_fenced_for_copies", "bulk_load", "ptx::mbarrier_init_fence();", "", "mbarrier_init_fence is missing"},

      {"bulk_load_of_too_few_bytes", "bulk_load", "expect_tx(shared.full, 4096)", "expect_tx(shared.full, 4112)",
       "dead-lock"},
      {"bulk_load_expects_too_few_bytes", "bulk_load", "expect_tx(shared.full, 4096)", "expect_tx(shared.full, 3072)", ""},
      {"bulk_load_not_waited_for", "bulk_load", "ptx::mbarrier_wait(shared.full, 0);", "", ""},
      {"bulk_load_misaligned", "bulk_load", "input + i * 1024,", "input + i * 1024 + 8,", "not a multiple of 16"},
      {"bulk_store_without_proxy_fence", "bulk_store", "ptx::fence_async_shared();", "", ""},
      {"bulk_store_fenced_before_the_write", "bulk_store",
       "shared.slots[round % 2][thread] = round * 64 + thread;\n    ptx::fence_async_shared();",
       "ptx::fence_async_shared();\n    shared.slots[round % 2][thread] = round * 64 + thread;", ""},
      {"bulk_store_slot_reused_before_it_was_read", "bulk_store", "ptx::bulk_wait_read<1>();", "", ""},
      {"bulk_store_not_waited_for_at_the_end", "bulk_store", "if (thread == 0) ptx::bulk_wait<0>();", "",
       "bulk_wait_read is missing"},
      {"tma_store_without_proxy_fence", "tma_store_4d", "ptx::fence_async_shared();", "", ""},
      {"tma_load_misaligned", "tma_load_4d", "tma_load_4d(shared.box,", "tma_load_4d(shared.box + 64,",
       "not a multiple of 128"},
      {"tma_load_out_of_range_tile", "tma_load_4d", "shared.full, 0, 4, 0, 2)", "shared.full, 0, 4, 0, 3)", ""},
      {"tma_load_of_another_rank", "tma_load_4d", "tma_load_4d(shared.box, args.maps[0], shared.full, 0, 4, 0, 2)",
       "tma_load_5d(shared.box, args.maps[0], shared.full, 0, 4, 0, 2, 0)", "rank 4, not 5"},
      {"tma_load_through_an_empty_map", "tma_load_4d", "(shared.box, args.maps[0]", "(shared.box, args.maps[1]",
       "holds no tensor map"},

      {"wgmma_without_fence", "wgmma_groups", "ptx::wgmma_fence();", "", "wgmma_fence is missing"},
      {"wgmma_without_proxy_fence", "wgmma_groups", "ptx::fence_async_shared();", "", ""},
      {"wgmma_waited_for_one_group_too_late", "wgmma_groups", "wgmma_wait<1>", "wgmma_wait<2>", ""},
      {"wgmma_not_waited_for", "wgmma_groups", "ptx::wgmma_wait<0>();", "", ""},
      {"wgmma_accumulator_written_in_flight", "wgmma_groups", "ptx::wgmma_wait<1>();",
       "ptx::wgmma_wait<1>(); second[5] = 0;", "was written while the product was in flight"},
      {"wgmma_operand_overwritten_in_flight", "wgmma_bfloat16_n64_rs_b_mn_128", "ptx::wgmma_commit();",
       "ptx::wgmma_commit(); fragment[0][0] = 1;", "operand A were written"},
      {"wgmma_tile_overwritten_in_flight", "wgmma_groups", "multiply(second, 2, false);",
       "multiply(second, 2, false); for (int i = thread; i < 8192; i += 128) shared.A[i] = 0; ptx::fence_async_shared();",
       ""},
      {"wgmma_tile_not_aligned", "wgmma_bfloat16_n64_rs_b_mn_128", "wgmma_descriptor(shared.B,",
       "wgmma_descriptor(shared.B + 256,", "not a multiple of its swizzle pattern"},
      {"wgmma_descriptor_out_of_range", "wgmma_groups", "wgmma_descriptor(shared.B, 16, 1024)",
       "wgmma_descriptor(shared.B, 16, 8192)", "outside the block's"},
      {"wgmma_of_three_warps", "wgmma_groups", "multiply(first, 0, false);", "if (thread >= 32) multiply(first, 0, false);",
       ""},

      {"tmem_store_not_waited_for", "tmem_rows", "ptx::tmem_wait_store();", "", "race: reads column"},
      {"tmem_load_not_waited_for", "tcgen05_bfloat16_n64_ss", "ptx::tmem_wait_load();", "", ""},
      {"tmem_load_waited_for_too_late", "tmem_rows", "ptx::tcgen05_fence_before();  // read",
       "ptx::tcgen05_fence_before(); ptx::tmem_load(row, base | lanes);", ""},
      {"tmem_written_before_others_have_read", "tmem_rows", "ptx::tcgen05_fence_before();  // read", "",
       "race: writes column"},
      {"tmem_fence_before_missing", "tmem_rows", "ptx::tmem_wait_store();\n      ptx::tcgen05_fence_before();",
       "ptx::tmem_wait_store();", "race: reads column"},
      {"tmem_fence_after_missing", "tmem_rows", "if (thread >= 128) {\n      ptx::tcgen05_fence_after();",
       "if (thread >= 128) {", "tcgen05_fence_after is missing"},
      {"tmem_fence_before_the_wait", "tmem_rows", "ptx::tmem_wait_store();\n      ptx::tcgen05_fence_before();",
       "ptx::tcgen05_fence_before();\n      ptx::tmem_wait_store();", "race: reads column"},
      {"tmem_lanes_of_another_warp", "tmem_rows", "ptx::tmem_load(row, base | lanes);",
       "ptx::tmem_load(row, base | (lanes ^ 32u << 16));", "this warp reaches the lanes from"},
      {"tmem_of_the_first_warp_alone", "tmem_rows", "ptx::tmem_store(base | lanes, row);", "ptx::tmem_store(base, row);",
       "this warp reaches the lanes from"},
      {"tmem_column_that_nothing_wrote", "tmem_rows", "ptx::tmem_load(rest, (base + 32) | lanes);",
       "ptx::tmem_load(rest, (base + 48) | lanes);", "to which nothing was written"},
      {"tmem_column_not_allocated", "tmem_rows", "ptx::tmem_load(rest, (base + 32) | lanes);",
       "ptx::tmem_load(rest, (base + 250) | lanes);", "not allocated"},
      {"tmem_dealloc_forgotten", "tmem_rows", "ptx::tmem_dealloc<256>(base);", "", "tmem_dealloc is missing"},
      {"tmem_dealloc_of_others", "tmem_rows", "ptx::tmem_dealloc<256>(base);", "ptx::tmem_dealloc<128>(base);",
       "no allocation of this block"},
      {"tmem_dealloc_before_others_have_read", "tcgen05_bfloat16_n64_ss",
       "ptx::tcgen05_fence_before();\n  __syncthreads();\n  if (thread < 32) {\n    ptx::tcgen05_fence_after();",
       "if (thread < 32) {", "race: gives back column"},
      {"tmem_allocated_after_relinquish", "tmem_rows", "ptx::tmem_relinquish();",
       "ptx::tmem_relinquish(); ptx::tmem_alloc<32>(shared.columns);", "given up its right"},
      {"tmem_more_than_there_is", "tmem_rows", "ptx::tmem_relinquish();", "ptx::tmem_alloc<512>(shared.columns);",
       "tmem_alloc of 512 columns"},
      {"tmem_no_power_of_two", "tmem_rows", "ptx::tmem_alloc<256>", "ptx::tmem_alloc<96>", "powers of two"},
      {"tmem_address_read_before_it_was_written", "tcgen05_bfloat16_n64_ss",
       "ptx::fence_async_shared();\n  __syncthreads();", "ptx::fence_async_shared();", ""},
      {"tmem_load_by_some_lanes", "tmem_rows", "ptx::tmem_load(row, base | lanes);",
       "if (thread % 2 == 0) ptx::tmem_load(row, base | lanes);", "different addresses"},

      {"tcgen05_not_waited_for", "tcgen05_bfloat16_n64_ss", "ptx::mbarrier_wait(shared.done, 0);", "",
       "race: reads column"},
      {"tcgen05_read_without_fence_after", "tcgen05_chain", "ptx::tcgen05_fence_after();  // S", "",
       "tcgen05_fence_after is missing"},
      {"tcgen05_multiplies_without_fence_after", "tcgen05_chain", "ptx::tcgen05_fence_after();  // P", "",
       "tcgen05_fence_after is missing"},
      {"tcgen05_P_not_waited_for", "tcgen05_chain", "ptx::tmem_wait_store();", "", "race: a product reads column"},
      {"tcgen05_P_not_published", "tcgen05_chain", "ptx::tcgen05_fence_before();  // P", "",
       "race: a product reads column"},
      {"tcgen05_P_read_before_it_was_written", "tcgen05_bfloat16_n128_ts_b_mn", "ptx::tmem_store((base + N) | lanes, row);",
       "", "to which nothing was written"},
      {"tcgen05_writes_over_P_that_is_read", "tcgen05_chain",
       "ptx::mbarrier_wait(shared.done, 1);\n  ptx::tcgen05_fence_after();  // free", "", "race: a product writes column"},
      {"tcgen05_commit_before_the_products", "tcgen05_bfloat16_n64_ss",
       "    for (int s = 0; s < 4; ++s) ptx::tcgen05_mma_ss",
       "    ptx::tcgen05_commit(shared.done);\n    for (int s = 0; s < 4; ++s) ptx::tcgen05_mma_ss", ""},
      {"tcgen05_commit_by_another_thread", "tcgen05_bfloat16_n64_ss", "    ptx::tcgen05_commit(shared.done);\n  }\n",
       "  }\n  if (thread == 32) ptx::tcgen05_commit(shared.done);\n", "race: reads column"},
      {"tcgen05_adds_to_what_nothing_wrote", "tcgen05_bfloat16_n64_ss", "s != 0);", "true);",
       "to which nothing was written"},
      {"tcgen05_without_proxy_fence", "tcgen05_bfloat16_n64_ss", "ptx::fence_async_shared();", "", ""},
      {"tcgen05_tile_overwritten_in_flight", "tcgen05_bfloat16_n64_ss", "ptx::tcgen05_commit(shared.done);",
       "ptx::tcgen05_commit(shared.done); for (int i = 0; i < 16384; i += 4) "
       "ptx::store_shared(ptx::shared_address(shared.A + "
       "i), 0);",
       "a product of tensor memory read"},
      {"tcgen05_descriptor_of_wgmma", "tcgen05_bfloat16_n64_ss", "ptx::tcgen05_descriptor(shared.A, 64 * 128, 1024)",
       "(ptx::tcgen05_descriptor(shared.A, 64 * 128, 1024) & 0x3fff3fffffffull | 1ull << 62)", "version 0"},
      {"tcgen05_descriptor_out_of_range", "tcgen05_bfloat16_n64_ss", "ptx::tcgen05_descriptor(shared.B, 64 * 128, 1024)",
       "ptx::tcgen05_descriptor(shared.B, 64 * 128, 8192)", "outside the block's"},
      {"tcgen05_wrong_major", "tcgen05_bfloat16_n128_ss_b_mn", "N, a_major, b_major>", "N, a_major, a_major>", ""},
      {"tcgen05_D_not_allocated", "tcgen05_bfloat16_n64_ss", "ptx::tcgen05_mma_ss(base,", "ptx::tcgen05_mma_ss(base + 200,",
       "is not allocated"},

      {"cluster_peer_read_too_early", "cluster_load_word", "+ thread;\n  ptx::cluster_arrive();\n  ptx::cluster_wait();",
       "+ thread;", ""},
      {"cluster_peer_read_after_its_end", "cluster_load_word",
       "+ rank * 10000;\n  ptx::cluster_arrive_relaxed();\n  ptx::cluster_wait();", "+ rank * 10000;",
       "has ended, its shared memory is gone"},
      {"cluster_word_read_before_the_other_block_came", "cluster_words", "ptx::cluster_mbarrier_wait(shared.met, 0);", "",
       ""},
      {"sent_floats_read_before_they_came", "cluster_store_async", "ptx::cluster_mbarrier_wait(shared.received, 0);", "",
       ""},
      {"sent_to_a_block_that_has_not_begun", "cluster_store_async", "  ptx::cluster_wait();", "", ""},
      {"sent_to_a_block_that_has_ended", "cluster_store_async", "cluster_mbarrier_wait(shared.received, 0);",
       "cluster_mbarrier_wait(shared.received, 0); if (rank == 2) ptx::cluster_store_async(to, ptx::Vector<float, 4>{}, "
       "barrier);",
       ""},
      {"sent_with_an_mbarrier_of_this_block", "cluster_store_async", "ptx::cluster_address(&shared.received, next)",
       "ptx::cluster_address(&shared.received, rank)", "not in the block that is stored to"},
      {"fewer_bytes_expected_than_sent", "cluster_store_async", "expect_tx(shared.received, 24)",
       "expect_tx(shared.received, 16)", ""},
      {"multicast_chunks_freed_by_one_block_alone", "tma_multicast_chunks", "mbarrier_init(shared.empty, 2)",
       "mbarrier_init(shared.empty, 1)", ""},
      {"multicast_slot_freed_by_one_block_alone", "tma_multicast", "mbarrier_init(shared.empty, 2)",
       "mbarrier_init(shared.empty, 1)", ""},
      {"multicast_of_half_the_bytes", "tma_multicast", "expect_tx(shared.full, 2048)", "expect_tx(shared.full, 1024)", ""},
  };
}

/// The kernel with the bug in it; without a body where it cannot be planted.
WrapperCase planted(const Bug& bug) {
  const WrapperCases& all = wrapper_cases();
  const auto original = std::find_if(all.begin(), all.end(), [&](const WrapperCase& c) { return c.name == bug.kernel; });
  WrapperCase wrong = original != all.end() ? *original : WrapperCase{};
  wrong.name = bug.name;
  bool done = false;
  for (std::size_t at = 0; (at = wrong.body.find(bug.from, at)) != std::string::npos; at += bug.to.size()) {
    wrong.body.replace(at, bug.from.size(), bug.to);
    done = true;
  }
  if (!done) wrong.body.clear();
  return wrong;
}

WrapperCases all_planted() {
  WrapperCases all;
  for (const Bug& bug : bugs()) all.push_back(planted(bug));
  return all;
}

/// What the emulator says of a kernel: an error, "wrong numbers", or nothing.
std::vector<std::string> verdicts(const WrapperCase& c) {
  static Together all(all_planted());
  std::vector<std::string> found;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    try {
      if (all.run(c.name, seed) != c.expected) found.push_back("wrong numbers");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::device_failed) << error.what();
      found.push_back(error.what());
    }
  }
  return found;
}

using Planted = ::testing::TestWithParam<Bug>;

TEST_P(Planted, IsFound) {
  const Bug& bug = GetParam();
  const WrapperCase wrong = planted(bug);
  ASSERT_FALSE(wrong.body.empty()) << "there is no kernel " << bug.kernel << " with\n" << bug.from;
  const std::vector<std::string> found = verdicts(wrong);
  ASSERT_FALSE(found.empty()) << "the bug went unnoticed under " << seeds << " seeds";
  if (bug.message.empty()) return;
  const bool said = std::any_of(found.begin(), found.end(),
                                [&](const auto& text) { return text.find(bug.message) != std::string::npos; });
  EXPECT_TRUE(said) << "no error says '" << bug.message << "'; the first: " << found.front();
}

INSTANTIATE_TEST_SUITE_P(Bugs, Planted, ::testing::ValuesIn(bugs()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace

inline void PrintTo(const Bug& bug, std::ostream* out) { *out << bug.name; }

}  // namespace flash_attention::testing
