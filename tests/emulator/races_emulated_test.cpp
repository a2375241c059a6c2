#include <gtest/gtest.h>

#include "emulator/emulate.h"
#include "flash_attention/error.h"

// Two accesses without an order between them are an error under every seed, even if the results are right; ordered accesses
// are not. `ORDER` in a kernel stands for the call that makes it right.
namespace flash_attention::testing {
namespace {

struct Race {
  std::string name;
  std::vector<std::string> headers;
  std::string order;  // taken out, it is a race
  std::string body;
  std::string message;  // part of it
  bool programmatic_launch = false;
};

const std::string address = "  const unsigned words = ptx::shared_address(shared.words);\n";
const std::string initialise =
    "  if (thread == 0) { ptx::mbarrier_init(shared.barrier, 1); ptx::mbarrier_init_fence(); }\n  __syncthreads();\n";

std::vector<Race> races() {
  return {
      {"write_then_read",
       {"memory"},
       "__syncthreads();",
       "  ptx::store_shared(words + 4 * thread, thread);\n  ORDER\n  ptx::load_shared<int>(words + 4 * (63 - thread));",
       "race: "},
      {"read_then_write",
       {"memory"},
       "__syncthreads();",
       "  ptx::load_shared<int>(words + 4 * (63 - thread));\n  ORDER\n  ptx::store_shared(words + 4 * thread, thread);",
       "race: "},
      {"write_then_write",
       {"memory"},
       "__syncthreads();",
       "  ptx::store_shared(words + 4 * thread, 1);\n  ORDER\n  ptx::store_shared(words + 4 * (63 - thread), 2);",
       "race: "},
      {"lanes_do_not_meet_in_a_shuffle",
       {"memory", "warp"},
       "__syncwarp();",
       "  ptx::store_shared(words + 4 * thread, thread);\n  ptx::shuffle_xor(thread, 1);\n  ORDER\n"
       "  ptx::load_shared<int>(words + 4 * (thread ^ 1));",
       "race: "},
      {"a_barrier_of_others",
       {"memory", "barrier"},
       "ptx::barrier_sync(1, 64);",
       "  ptx::store_shared(words + 4 * thread, thread);\n  if (thread < 32) ptx::barrier_sync(2, 32);\n  ORDER\n"
       "  ptx::load_shared<int>(words + 4 * (63 - thread));",
       "race: "},
      {"a_copy_of_its_own",
       {"memory", "async"},
       "ptx::copy_async_wait<0>();",
       "  ptx::copy_async(words + 16 * thread, input + 16 * thread);\n  ptx::copy_async_commit();\n  ORDER\n"
       "  ptx::load_shared<int>(words + 16 * thread);",
       "copy_async of thread"},
      {"a_copy_of_another_thread",
       {"memory", "async"},
       "__syncthreads();",
       "  ptx::copy_async(words + 16 * thread, input + 16 * thread);\n  ptx::copy_async_commit();\n"
       "  ptx::copy_async_wait<0>();\n  ORDER\n  ptx::load_shared<int>(words + 16 * (63 - thread));",
       "race: "},
      {"a_bulk_load",
       {"memory", "mbarrier", "tma"},
       "ptx::mbarrier_wait(shared.barrier, 0);",
       initialise + "  if (thread == 0) ptx::mbarrier_arrive_expect_tx(shared.barrier, 256);\n"
                    "  if (thread == 0) ptx::bulk_load(shared.words, input, 256, shared.barrier);\n  ORDER\n"
                    "  ptx::load_shared<int>(words + 4 * thread);\n  ptx::mbarrier_wait(shared.barrier, 0);",
       "race: "},
      {"a_bulk_store",
       {"memory", "fence", "tma"},
       "ptx::bulk_wait_read<0>();",
       "  if (thread == 0) {\n    ptx::bulk_store(output, shared.words, 256);\n    ptx::bulk_commit();\n    ORDER\n"
       "    ptx::store_shared(words, 7);\n    ptx::bulk_wait<0>();\n  }",
       "a bulk store of thread 0, still in flight, read"},
      {"a_store_and_a_bulk_load_behind_it",
       {"memory", "mbarrier", "fence", "tma"},
       "ptx::fence_async_shared();",
       initialise + "  ptx::store_shared(words + 4 * thread, 0);\n  ORDER\n  __syncthreads();\n"
                    "  if (thread == 0) ptx::mbarrier_arrive_expect_tx(shared.barrier, 256);\n"
                    "  if (thread == 0) ptx::bulk_load(shared.words, input, 256, shared.barrier);\n"
                    "  ptx::mbarrier_wait(shared.barrier, 0);",
       "fence_async_shared is missing"},
      {"one_lane_arrives_for_its_warp",
       {"memory", "mbarrier"},
       "__syncwarp();",
       initialise +
           "  if (thread >= 32) {\n    ptx::store_shared(words + 4 * thread, thread);\n    ORDER\n"
           "    if (thread == 32) ptx::mbarrier_arrive(shared.barrier);\n  } else {\n"
           "    ptx::mbarrier_wait(shared.barrier, 0);\n    ptx::load_shared<int>(words + 4 * (63 - thread));\n  }",
       "race: "},
      {"an_mbarrier_before_it_is_known",
       {"memory", "mbarrier"},
       "__syncthreads();",
       "  if (thread == 0) ptx::mbarrier_init(shared.barrier, 1);\n  for (int i = 0; i < 200; ++i) "
       "ptx::load_shared<int>(words);\n"
       "  ORDER\n  if (thread == 63) ptx::mbarrier_arrive(shared.barrier);",
       "mbarrier"},
      {"global_memory_within_a_block",
       {"memory"},
       "__syncthreads();",
       "  ptx::store_global((int*)output + thread, 1);\n  ORDER\n  ptx::store_global((int*)output + 63 - thread, 2);",
       "global memory"},
      {"a_store_while_the_launch_before_may_run",
       {"memory", "launch"},
       "ptx::griddepcontrol_wait();",
       "  if (thread == 0) {\n    ORDER\n  }\n  __syncthreads();\n  ptx::store_global((int*)output + thread, 1);",
       "griddepcontrol_wait is missing",
       true},
      {"waiting_for_the_launch_before_is_told_by_a_barrier",
       {"memory", "launch"},
       "__syncthreads();",
       "  if (thread == 0) ptx::griddepcontrol_wait();\n  ORDER\n  ptx::store_global((int*)output + thread, 1);",
       "griddepcontrol_wait is missing",
       true},
      {"a_load_from_the_workspace",
       {"memory", "launch"},
       "ptx::griddepcontrol_wait();",
       "  ORDER\n  ptx::load_global((const int*)output + thread);\n  ptx::griddepcontrol_wait();",
       "griddepcontrol_wait is missing",
       true},
  };
}

/// What the emulator said; nothing where it ran.
std::string error_under_race(const Race& race, const std::string& order, std::uint64_t seed) {
  std::string body = address + race.body;
  body.replace(body.find("ORDER"), 5, order);
  WrapperCase c{.name = "race_" + race.name,
                .headers = race.headers,
                .storage = "  alignas(16) int words[256];\n  alignas(8) unsigned long long unused;\n",
                .body = body,
                .shape = {.block = 64, .programmatic_launch = race.programmatic_launch},
                .input = Bytes(1024),
                .expected = Bytes(1024)};
  if (body.find("barrier,") != std::string::npos || body.find("barrier)") != std::string::npos)
    c.storage += "  ptx::Mbarrier barrier;\n";
  try {
    emulate(c, seed);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

using Races = ::testing::TestWithParam<Race>;

TEST_P(Races, AreFoundUnderEverySeed) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    EXPECT_EQ(error_under_race(GetParam(), GetParam().order, seed), "");
    const std::string text = error_under_race(GetParam(), "", seed);
    EXPECT_NE(text.find(GetParam().message), std::string::npos) << "seed " << seed << ": '" << text << "'";
  }
}

INSTANTIATE_TEST_SUITE_P(All, Races, ::testing::ValuesIn(races()), [](const auto& race) { return race.param.name; });

/// Two warps make the same words 0, and each reads them after its own stores.
TEST(NoRace, WritingTheSame) {
  const Race race{.name = "same_zeros",
                  .headers = {"memory"},
                  .order = "",
                  .body =
                      "  ptx::store_shared(words + 4 * (thread % 32), 0);\n  __syncwarp();\n  ORDER\n"
                      "  ptx::load_shared<int>(words + 4 * (31 - thread % 32));",
                  .message = ""};
  for (std::uint64_t seed = 0; seed < 6; ++seed) EXPECT_EQ(error_under_race(race, "", seed), "");
}

}  // namespace
}  // namespace flash_attention::testing
