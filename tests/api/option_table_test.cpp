// Each row of the table of options, switched on: the C struct carries it, the hash sees it, the predicates of Features say
// what the row says of scores, and kernels are told. tests/cli/test_option_flags.py asks the same of the command.
#include "api/option_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "api/c/structs.h"
#include "api/checks/validate.h"
#include "flash_attention/plan.h"
#include "launch/arguments.h"
#include "plan/features.h"

namespace flash_attention::testing {
namespace {

// A value that is not the default, for each type that a field has.
void switch_on(bool& field) { field = true; }
void switch_on(float& field) { field = 0.25f; }
void switch_on(std::int64_t& field) { field = 3; }
void switch_on(std::uint32_t& field) { field = 1; }
void switch_on(std::string& field) { field = "v = ge i j\nvisible = v"; }
void switch_on(std::optional<float>& field) { field = 0.25f; }
void switch_on(std::optional<Dtype>& field) { field = Dtype::float8_e4m3; }
void switch_on(Dtype& field) { field = Dtype::bfloat16; }
void switch_on(Alignment& field) { field = Alignment::top_left; }
void switch_on(Precision& field) { field = Precision::fast; }
void switch_on(ScaleKind& field) { field = ScaleKind::tensor; }
void switch_on(Strides& field) { field = {96, 16, 32}; }
void switch_on(ScoreTensor& field) { field.present = true; }
void switch_on(HiddenRows& field) { field.bounds = 2; }
void switch_on(BlockMask& field) { field.block_q = field.block_kv = 64; }
void switch_on(BitMask& field) { field.kind = BitMaskKind::keys, field.offsets = true; }
void switch_on(KeyList& field) { field.kind = KeyListKind::keys, field.entries = 2; }
void switch_on(decltype(Problem::program_sizes)& field) { field[1] = {2, 3, 0, 0}; }

// The same value in the C struct.
template <class C, class T>
void to_c(C& c, const T& value) {
  c = static_cast<C>(value);
}
void to_c(float& c, const std::optional<float>& value) { c = *value; }
void to_c(std::int32_t& c, const std::optional<Dtype>& value) { c = static_cast<std::int32_t>(*value); }
void to_c(flash_attention_strides& c, const Strides& value) { c = {value.batch, value.seq, value.head}; }
void to_c(flash_attention_score_tensor& c, const ScoreTensor& value) { c.present = value.present; }
void to_c(const char*& c, const std::string& value) { c = value.c_str(); }
void to_c(std::int64_t (&c)[8][4], const decltype(Problem::program_sizes)& value) {
  for (std::size_t n = 0; n < value.size(); ++n) std::copy(value[n].begin(), value[n].end(), c[n]);
}

const Problem untouched{.seq_q = 40, .seq_kv = 40, .head_dim = 16};

/// A row of the table: its field of Problem, and how the field comes into the C struct (null: in parts).
struct Row {
  const char* name;
  const char* scores;
  void (*set)(Problem&);
  void (*set_c)(flash_attention_problem&, const Problem&);
};

#define ROW_same(name, scores)                            \
  {#name, #scores, [](Problem& p) { switch_on(p.name); }, \
   [](flash_attention_problem& c, const Problem& p) { to_c(c.name, p.name); }},
#define ROW_parts(name, scores) {#name, #scores, [](Problem& p) { switch_on(p.name); }, nullptr},
#define ROW_call(name, scores)
#define ROW_OPTION(kind, name, default_value, argument, expected, form, scores) ROW_##form(name, scores)
#define ROW_FIELD(name, form, scores) ROW_##form(name, scores)
const Row call_options[] = {FLASH_ATTENTION_CALL_OPTIONS(ROW_OPTION)};
const Row rows[] = {FLASH_ATTENTION_CALL_OPTIONS(ROW_OPTION) FLASH_ATTENTION_OTHER_FIELDS(ROW_FIELD)};

Problem with(const Row& row) {
  Problem problem = untouched;
  row.set(problem);
  return problem;
}

TEST(OptionTable, TheHashSeesEveryRow) {
  for (const Row& row : rows) EXPECT_NE(hash_value(with(row)), hash_value(untouched)) << row.name;
}

TEST(OptionTable, TheCStructCarriesEveryRow) {
  for (const Row& row : rows) {
    if (row.set_c == nullptr) continue;
    const Problem problem = with(row);
    flash_attention_problem c;
    flash_attention_problem_init(&c);
    c.seq_q = untouched.seq_q, c.seq_kv = untouched.seq_kv, c.head_dim = untouched.head_dim;
    row.set_c(c, problem);
    EXPECT_EQ(api::problem_of(&c), problem) << row.name;
  }
}

TEST(OptionTable, FeaturesSayWhatARowDoesToScores) {
  const abi::Features off = plan::features_of(api::normalise(untouched, Pass::forward));
  ASSERT_FALSE(off.touches_scores() || off.hides_keys());
  for (const Row& row : rows) {
    const std::string scores = row.scores;
    if (scores == "nothing") continue;
    const abi::Features on = plan::features_of(api::normalise(with(row), Pass::forward));
    EXPECT_TRUE(scores == "touches" ? on.touches_scores() : on.hides_keys()) << row.name;
  }
}

/// What Python gives by name and does something to scores reaches GPU kernels: by their arguments, or as a program.
TEST(OptionTable, KernelsAreToldOfOptionsOfScores) {
  const DeviceInfo gpu = typical_gpu(90);
  const auto told = [&](const Problem& given) {
    const Problem p = api::normalise(given, Pass::forward);
    return launch::make_arguments(p, make_plan(p, Pass::forward, gpu, "forward/portable"), {}, {});
  };
  const auto same = [](const abi::AttentionArgs& a, const abi::AttentionArgs& b) { return std::memcmp(&a, &b, sizeof a) == 0; };
  ASSERT_TRUE(same(told(untouched), told(untouched)));
  for (const Row& row : call_options) {
    if (row.scores == std::string("nothing")) continue;
    const bool as_program = !api::normalise(with(row), Pass::forward).program.empty();
    EXPECT_TRUE(as_program || !same(told(with(row)), told(untouched))) << row.name;
  }
}

}  // namespace
}  // namespace flash_attention::testing
