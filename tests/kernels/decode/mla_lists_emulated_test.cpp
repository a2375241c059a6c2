// decode/mla_sm90 over lists of keys: each query has its own, with holes, keys twice, and in pages.
#include "kernels/emulated.h"

namespace flash_attention::testing {
namespace {

std::vector<Case> mla_list_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::int64_t entries, void (*change)(Case&, Problem&)) {
    Case c = base(name, Dtype::bfloat16);
    Problem& p = c.problem;
    p.heads_q = 64, p.heads_kv = 1, p.seq_q = 2, p.seq_kv = 211, p.head_dim = 576, p.head_dim_v = 512, p.latent = true;
    p.key_list = {.kind = KeyListKind::keys, .entries = entries};
    change(c, p);
    cases.push_back(std::move(c));
  };
  add("mla_list", 130, [](Case&, Problem&) {});
  add("mla_list_two_tiles_of_rows", 200, [](Case& c, Problem& p) { p.heads_q = 128, c.draw = Draw::growing; });
  add("mla_list_few_heads", 65, [](Case&, Problem& p) { p.heads_q = 16, p.seq_q = 5, p.key_list.counts = true; });
  add("mla_list_odd_heads", 63, [](Case& c, Problem& p) { p.heads_q = 70, c.draw = Draw::large; });
  add("mla_list_sink", 300, [](Case&, Problem& p) { p.sink = true, p.seqused_kv = true; });
  add("mla_list_one", 1, [](Case&, Problem& p) { p.dtype = Dtype::float16; });
  add("mla_list_nan", 20, [](Case& c, Problem& p) { c.nan_value = 70, p.batch = 1; });
  add("mla_list_by_key_head", 90, [](Case&, Problem& p) { p.heads_q = 12, p.heads_kv = 2, p.key_list.heads = 2; });
  for (Case& c : cases) {
    if (c.problem.seqused_kv) c.seqused_kv = {150, 211};
  }
  Case paged = cases.front();
  paged.name = "mla_list_pages";
  Problem& p = paged.problem;
  p.page_size = 16, p.num_pages = 30, p.seqused_kv = true, paged.seqused_kv = {211, 90};
  for (int page = 0; page < 28; ++page) paged.page_table.push_back((page * 11 + 3) % 30);
  cases.push_back(paged);
  return cases;
}

using MlaLists = ::testing::TestWithParam<Case>;

TEST_P(MlaLists, Emulated) { check_sm90(GetParam(), "decode/mla_sm90", Pass::forward, 3); }

INSTANTIATE_TEST_SUITE_P(Bfloat16, MlaLists, ::testing::ValuesIn(mla_list_cases()), case_name);

}  // namespace
}  // namespace flash_attention::testing
