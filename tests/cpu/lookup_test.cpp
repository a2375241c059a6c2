// Decoding as machines with AMX do it, on others (lookup_table.cpp), put through the contract.

#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "api/checks/validate.h"
#include "cpu/call.h"
#include "cpu/detect.h"
#include "cpu/key_bounds.h"
#include "cpu/tails.h"
#include "launch/cpu_call.h"
#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/oracle/pages.h"
#include "support/oracle/tensors.h"

#if defined(__x86_64__) && !defined(FLASH_ATTENTION_GENERIC_CPU)
namespace flash_attention::cpu {
extern const KernelTable lookup_table;
}

namespace flash_attention::testing {
namespace {

class LookupDecode : public ::testing::TestWithParam<Case> {
 protected:
  /// Nothing where the kernel does not take the case.
  static std::optional<Plan> plan_of(const Case& c) {
    DeviceInfo device;
    device.isa = CpuIsa::amx;
    device.threads = 3;
    try {
      return make_plan(c.problem, Pass::forward, device, "cpu/decode");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
      return {};
    }
  }

  static Results run(const Case& c, const Plan& plan, const Inputs& in) {
    const auto memory = memory_of({});
    Tensors tensors(c, in, *memory);
    std::vector<char> dirt(plan.workspace_bytes, static_cast<char>(0xff));
    const Options options{.workspace = dirt.data(), .seed = c.dropout_seed, .offset = c.dropout_offset};
    const cpu::KernelTable& table = cpu::lookup_table;
    cpu::Call call =
        cpu::make_call(api::normalise(c.problem, Pass::forward), plan, table.block_q, tensors.buffers(), options);
    void* scratch = memory->allocate(table.scratch_bytes);
    cpu::clear_tails(call, false);
    cpu::find_key_bounds(call);
    for (const cpu::Step* step = table.decode; step->count != nullptr; ++step) {
      for (std::int64_t item = 0; item < step->count(call); ++item) step->run(call, item, scratch);
    }
    EXPECT_EQ(tensors.written_gap(), "");
    return tensors.read(false);
  }

  void SetUp() override {
    if (!cpu::has_isa(CpuIsa::avx512_bf16)) GTEST_SKIP() << "this CPU has no AVX512-BF16";
  }
};

TEST_P(LookupDecode, Forward) {
  const Case& c = GetParam();
  const std::optional<Plan> plan = plan_of(c);
  if (!plan) GTEST_SKIP() << "not for this kernel";
  const Inputs in = draw_inputs(c);
  const Results want = oracle(c, in, false), plain = oracle(c, in, false, c.problem.dtype), got = run(c, *plan, in);
  compare("out", got.out, want.out, plain.out, c.problem.dtype);
  compare("lse", got.lse, want.lse, want.lse, Dtype::float32);
}

/// 8-bit keys have the bits of the 16-bit ones that they are worth.
TEST_P(LookupDecode, NarrowKeysHaveTheBitsOfSixteen) {
  Case c = GetParam();
  if (!c.problem.kv_dtype || c.nan_value >= 0 || c.nan_key >= 0) GTEST_SKIP() << "no 8-bit keys, or NaN";
  c.power_scales = true;
  Inputs in = draw_inputs(c);
  const std::optional<Plan> plan = plan_of(c);
  if (!plan) GTEST_SKIP() << "not for this kernel";
  const Results narrow = run(c, *plan, in);
  const Dtype codes = *c.problem.kv_dtype;
  c.problem.kv_dtype.reset();
  c.problem.kv_scales = ScaleKind::none;
  c.problem.k_scale_strides = c.problem.v_scale_strides = Strides{};
  in.k_codes.clear(), in.v_codes.clear();
  for (std::vector<double>* values : {&in.k, &in.v}) {  // int8 has no NaN: nothing asks for care
    for (double& x : *values) x = codes == Dtype::int8 && !std::isfinite(x) ? 1 : x;
  }
  EXPECT_EQ(first_changed(narrow, run(c, plan_of(c).value(), in)), "");
}

/// Every number of rows and width that look-ups take, and options by turns.
std::vector<Case> cases_of_rows() {
  std::vector<Case> cases;
  int number = 0;
  for (const int group : {1, 2, 3, 4, 5, 8, 11}) {
    for (const int head_dim : {64, 128, 192, 256}) {
      for (const Dtype codes : {Dtype::bfloat16, Dtype::float8_e4m3, Dtype::float8_e5m2, Dtype::int8}) {
        const std::string name =
            "rows_" + std::to_string(group) + "_of_" + std::to_string(head_dim) + "_" + std::string(to_string(codes));
        Case c = base(name.c_str(), Dtype::bfloat16);
        Problem& p = c.problem;
        p.seq_q = 1, p.heads_q = group * p.heads_kv, p.head_dim = head_dim, p.head_dim_v = head_dim == 192 ? 128 : head_dim;
        p.seq_kv = number % 2 == 0 ? 131 : 320;
        if (codes != Dtype::bfloat16)
          p.kv_dtype = codes, p.kv_scales = number % 3 == 0 ? ScaleKind::token : ScaleKind::head;
        switch (number++ % 7) {
          case 0:
            p.mask = over(p, true, true, true), c.nan_value = codes == Dtype::int8 ? -1 : 30;
            break;
          case 1:
            put_in_pages(c, 16, {131, 77});
            break;
          case 2:
            p.softcap = 5, p.window_left = 40;
            break;
          case 3:
            put_in_pages(c, 7, {131, 77});
            break;
          case 4:
            p.dropout_p = 0.2f, c.draw = Draw::growing;
            break;
          case 5:
            p.bias = over(p, false, true, true);
            break;
          default:
            break;
        }
        cases.push_back(c);
      }
    }
  }
  return cases;
}

std::vector<Case> lookup_cases() {
  std::vector<Case> cases = cases_of_rows();
  for (auto more : {contract_cases, cache_cases, narrow_key_cases, mask_cases}) {
    for (const Case& c : more(Dtype::bfloat16)) cases.push_back(c);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Contract, LookupDecode, ::testing::ValuesIn(lookup_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
#endif
