#include "jit/kernel_key.h"

#include <gtest/gtest.h>

namespace flash_attention::jit {
namespace {

Launch example_launch() {
  return {.unit = "forward/sm90",
          .entry = "forward_sm90",
          .config = "ForwardConfig{.head_dim = 128}",
          .grid = {7, 2, 1},
          .block = 384,
          .cluster = 2,
          .shared_bytes = 200000,
          .min_blocks_per_sm = 1};
}

TEST(KernelKey, the_generated_unit_is_a_few_readable_lines) {
  EXPECT_EQ(emit(make_key(example_launch(), 90), "forward/sm90/kernel.cuh"),
            "// forward/sm90 for sm_90a\n"
            "#include \"forward/sm90/kernel.cuh\"\n"
            "\n"
            "using namespace flash_attention;\n"
            "using namespace flash_attention::abi;\n"
            "\n"
            "extern \"C\" __global__ void __launch_bounds__(384, 1) kernel(const __grid_constant__ AttentionArgs args) {\n"
            "  forward_sm90<ForwardConfig{.head_dim = 128}>(args);\n"
            "}\n");
}

TEST(KernelKey, an_entry_without_configuration_is_called_plainly) {
  Launch launch = example_launch();
  launch.config = {};
  EXPECT_NE(emit(make_key(launch, 80), "ladder/00_naive.cu").find("  forward_sm90(args);\n"), std::string::npos);
}

TEST(KernelKey, a_plain_kernel_is_its_file_and_nothing_else) {
  const KernelKey plain{.unit = "primer/vector_add", .entry = "vector_add", .config = {}, .arch = 80, .plain = true};
  EXPECT_EQ(emit(plain, "primer/vector_add.cu"),
            "// primer/vector_add for sm_80\nextern \"C\" {\n#include \"primer/vector_add.cu\"\n}\n");
}

TEST(KernelKey, names_tell_the_entries_of_a_unit_apart) {
  Launch launch = example_launch();
  EXPECT_EQ(to_string(make_key(launch, 90)), "forward/sm90 sm_90a ForwardConfig{.head_dim = 128}");
  EXPECT_EQ(file_stem(make_key(launch, 90)), "forward_sm90-sm_90a");
  launch.entry = "forward_sm90_merge";
  EXPECT_EQ(to_string(make_key(launch, 90)), "forward/sm90 forward_sm90_merge sm_90a ForwardConfig{.head_dim = 128}");
  EXPECT_EQ(file_stem(make_key(launch, 90)), "forward_sm90_merge-sm_90a");
  launch.entry = "merge";
  EXPECT_EQ(file_stem(make_key(launch, 90)), "forward_sm90_merge-sm_90a");
}

TEST(KernelKey, sizes_of_the_launch_make_no_new_kernel) {
  Launch other = example_launch();
  other.grid = {1, 1, 1};
  other.shared_bytes = 0;
  EXPECT_EQ(make_key(example_launch(), 90), make_key(other, 90));
  other.block = 128;
  EXPECT_NE(make_key(example_launch(), 90), make_key(other, 90));
  EXPECT_NE(make_key(example_launch(), 90), make_key(example_launch(), 80));
}

TEST(KernelKey, architectures_from_9_0_on_use_their_own_features) {
  EXPECT_EQ(arch_name(80), "sm_80");
  EXPECT_EQ(arch_name(89), "sm_89");
  EXPECT_EQ(arch_name(90), "sm_90a");
  EXPECT_EQ(arch_name(100), "sm_100a");
}

}  // namespace
}  // namespace flash_attention::jit
