#include <gtest/gtest.h>

#include "support/compile.h"
#include "support/long_tail.h"

namespace flash_attention::testing {
namespace {

Problem decoding(std::int64_t head_dim, std::int64_t group, std::int64_t seq_q) {
  return {.batch = 64,
          .seq_q = seq_q,
          .seq_kv = 4096,
          .heads_q = 8 * group,
          .heads_kv = 8,
          .head_dim = head_dim,
          .dtype = Dtype::bfloat16,
          .causal = true,
          .seqused_kv = true};
}

Problem in_pages(Problem problem) {
  problem.page_size = 16;
  problem.num_pages = 100000;
  return problem;
}

/// A tree of drafts behind each sequence, and a window for each.
Problem drafts(std::int64_t head_dim) {
  Problem problem = in_pages(decoding(head_dim, 4, 4));
  problem.bit_mask = {.kind = BitMaskKind::drafts, .row_bytes = 8, .offsets = true};
  problem.sequence_windows = true;
  return problem;
}

/// Every option that the kernel takes.
Problem all_options(std::int64_t head_dim, std::int64_t group, std::int64_t seq_q) {
  Problem problem = in_pages(decoding(head_dim, group, seq_q));
  problem.dtype = Dtype::float16;
  problem.softcap = 30;
  problem.bias = {.present = true, .dtype = Dtype::float16, .q_stride = 4096};
  problem.mask = {.present = true, .q_stride = 4096};
  problem.alibi = problem.key_lengths = problem.seqused_q = problem.left_padding = problem.sink = true;
  problem.window_left = 100;
  return problem;
}

class DecodeCompile : public ::testing::TestWithParam<int> {};

TEST_P(DecodeCompile, WithoutSpills) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  const int arch = GetParam();
  const DeviceInfo device{
      .device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = 108, .shared_bytes = shared_limit(arch)};
  std::vector<Plan> plans;
  std::vector<Problem> problems{in_pages(decoding(128, 4, 1)), decoding(256, 8, 16)};
  if (!with_long_tail()) problems.pop_back();
  if (with_long_tail() || arch == 80) problems.push_back(in_pages(decoding(512, 2, 1)));
  if (!with_long_tail() && arch != 80) problems.pop_back();  // on 90 with more options; archs_compile_test has a later one
  if (arch == 90) {  // tiles of 8, 16, 32 and 64 rows, with few options and with all
    if (with_long_tail()) problems.insert(problems.end(), {in_pages(decoding(128, 7, 4)), in_pages(decoding(256, 4, 4))});
    for (const std::int64_t head_dim : {128, 256}) {  // the widest tile with all options needs most registers
      if (with_long_tail()) problems.push_back(in_pages(decoding(head_dim, 8, 16)));
      if (head_dim == 256 || with_long_tail()) problems.push_back(all_options(head_dim, 8, 16));
    }
    problems.push_back(drafts(256));
    problems.push_back(drafts(128));
    problems.back().invariant = true;
    if (with_long_tail()) problems.push_back(all_options(128, 4, 1));  // the splits below have them, too
    for (Problem problem : {all_options(128, 4, 1), in_pages(decoding(128, 4, 1)), in_pages(decoding(256, 4, 1))}) {
      if (!problem.sink && !with_long_tail()) break;
      problem.invariant = true;
      problem.bias = problem.mask = {};  // with both and fixed splits, registers are spilled
      problems.push_back(problem);
    }
  }
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {  // K and V in 8 bits
    for (const Dtype codes : {Dtype::float8_e4m3, Dtype::int8}) {
      if (!with_long_tail() && (arch != 90 || dtype != Dtype::float16 || codes != Dtype::int8)) continue;
      Problem narrow =
          in_pages(decoding(arch == 90 && codes == Dtype::int8 ? 256 : 128, 4, dtype == Dtype::bfloat16 ? 1 : 8));
      narrow.dtype = dtype, narrow.kv_dtype = codes;
      narrow.kv_scales = codes == Dtype::int8 ? ScaleKind::token : ScaleKind::head;
      problems.push_back(narrow);
    }
  }
  Problem listed = in_pages(decoding(128, 16, 4));  // keys of a query by their list
  listed.key_list = {.kind = KeyListKind::keys, .entries = 2048, .heads = 8, .counts = true};
  listed.softcap = 30, listed.sink = true;
  problems.push_back(listed);
  listed.head_dim = 256, listed.key_list = {.kind = KeyListKind::blocks, .entries = 16, .heads = 8, .block_kv = 128};
  if (with_long_tail()) problems.push_back(listed);
  for (const Problem& problem : problems) plans.push_back(make_plan(problem, Pass::forward, device, "decode/sm80"));
  if (arch == 90) {
    Problem splits = in_pages(decoding(128, 4, 1)), narrow = in_pages(decoding(128, 4, 1));
    splits.invariant = true;
    narrow.kv_dtype = Dtype::float8_e4m3, narrow.kv_scales = ScaleKind::head;
    Problem cluster = all_options(128, 4, 4);  // one for each key head
    cluster.batch = 1;
    Problem two_warps = decoding(128, 8, 4);  // along the rows
    two_warps.batch = 2;
    std::vector<Problem> loaded{in_pages(decoding(128, 4, 1)),
                                in_pages(decoding(512, 2, 1)),
                                all_options(128, 4, 1),
                                narrow,
                                cluster,
                                two_warps,
                                drafts(128)};
    if (with_long_tail())
      loaded.insert(loaded.end(), {decoding(64, 8, 1), decoding(256, 4, 2), splits, all_options(128, 16, 4)});
    for (const Problem& problem : loaded) plans.push_back(make_plan(problem, Pass::forward, device, "decode/sm90"));
  }
  std::vector<Plan> grouped_plans;
  for (const Dtype codes : {Dtype::nvfp4, Dtype::mxfp4, Dtype::int4}) {  // in 4 bits
    for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
      if (!with_long_tail() && (arch == 80 || dtype == Dtype::float16) != (codes == Dtype::int4)) continue;
      Problem grouped = in_pages(decoding(codes == Dtype::mxfp4 ? 256 : 128, 4, codes == Dtype::int4 ? 8 : 1));
      grouped.dtype = dtype, grouped.kv_dtype = codes, grouped.causal = false;
      grouped_plans.push_back(make_plan(grouped, Pass::forward, device, "decode/sm80"));
      if (codes == Dtype::mxfp4 && !with_long_tail()) continue;
      Problem dense = decoding(128, 4, 1);  // four blocks on an SM of sm_90
      dense.dtype = dtype, dense.kv_dtype = codes, dense.causal = dense.seqused_kv = false;
      grouped_plans.push_back(make_plan(dense, Pass::forward, device, "decode/sm80"));
    }
  }
  expect_plans_compile(plans, arch);
  // Four blocks on an SM are worth what they spill where an item begins or ends (decode_group_blocks).
  expect_plans_compile(grouped_plans, arch, 400);
}

std::vector<int> architectures() { return with_long_tail() ? std::vector<int>{80, 90, 100} : std::vector<int>{80, 90}; }

INSTANTIATE_TEST_SUITE_P(Architectures, DecodeCompile, ::testing::ValuesIn(architectures()),
                         [](const auto& param) { return "sm_" + std::to_string(param.param); });

}  // namespace
}  // namespace flash_attention::testing
