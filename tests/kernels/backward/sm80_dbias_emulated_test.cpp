// dbias with mma.sync, in both of its tiles. Few SMs: each block goes over several tiles, one after the other.
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

struct BiasGradientSm80 : ::testing::TestWithParam<Case> {
  BiasGradientSm80() { emulator::set_num_sms(1); }
  ~BiasGradientSm80() override { emulator::set_num_sms(0); }
};

TEST_P(BiasGradientSm80, Emulated) { check_emulated(GetParam(), "backward/sm80", Pass::backward); }

/// Those of the contract, and sizes at which a block changes from tile to tile with loads in flight.
std::vector<Case> bias_gradients(Dtype dtype) {
  std::vector<Case> contract = contract_cases(dtype);
  std::erase_if(contract, [](const Case& c) { return !c.dbias; });
  std::vector<Case> cases = share_of(contract, 4, 0);
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    c.dbias = true;
    change(c, c.problem);
    cases.push_back(std::move(c));
  };
  add("tiles_of_heads", [](Case&, Problem& p) {
    p.seq_q = 140, p.seq_kv = 270, p.head_dim = 72, p.head_dim_v = 136, p.causal = true,
    p.bias = over(p, false, true, true);
  });
  add("tiles_of_a_batch_odd", [](Case&, Problem& p) {  // no pair of elements may be stored at once
    p.seq_q = 129, p.seq_kv = 133, p.head_dim = p.head_dim_v = 32, p.bias = over(p, true, false, true, p.dtype);
  });
  add("tiles_window_of_queries", [](Case&, Problem& p) {  // tiles of which nothing is seen lie between others
    p.seq_q = 200, p.seq_kv = 400, p.window_left = 20, p.window_right = 0, p.bias = over(p, true, true, true);
  });
  add("tiles_all_queries", [](Case&, Problem& p) {
    p.seq_q = 300, p.seq_kv = 150, p.head_dim = p.head_dim_v = 128, p.bias = over(p, false, false, false);
  });
  add("tiles_packed_groups", [](Case& c, Problem& p) {
    pack(c, {70, 0, 130}, {90, 10, 133}), p.head_dim = p.head_dim_v = 32, p.heads_q = 4, p.causal = true;
    p.bias = over(p, true, false, true);
  });
  add("tiles_dropout_window", [](Case&, Problem& p) {
    p.seq_q = 140, p.seq_kv = 150, p.dropout_p = 0.25f, p.window_left = 70, p.bias = over(p, false, true, true);
  });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, BiasGradientSm80, ::testing::ValuesIn(bias_gradients(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Float16, BiasGradientSm80, ::testing::ValuesIn(some_of(bias_gradients(Dtype::float16), 4)),
                         case_name);

}  // namespace
}  // namespace flash_attention::testing
