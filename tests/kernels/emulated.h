#pragma once

#include <algorithm>
#include <functional>

#include "emulator/host/seed.h"
#include "support/cases/contract.h"
#include "support/cases/make_case.h"
#include "support/long_tail.h"
#include "support/oracle/case_programs.h"

namespace flash_attention::testing {

/// The case in the emulator, under a schedule of its own: over all cases, many schedules.
inline void check_emulated(const Case& c, const char* kernel, Pass pass) {
  emulator::set_seed(std::hash<std::string>{}(c.name + std::string(to_string(c.problem.dtype))));
  check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = kernel, .pass = pass});
}

/// A schedule of its own for each case; four in the long tail.
inline std::vector<std::uint64_t> schedules(const Case& c) {
  if (with_long_tail()) return {1, 2, 3, 4};
  return {std::hash<std::string>{}(c.name)};
}

/// The case on so few SMs that a block takes several tiles or tasks, one after another, under all of its schedules.
inline void check_sm90(const Case& c, const char* kernel, Pass pass, int num_sms) {
  emulator::set_num_sms(num_sms);
  for (const std::uint64_t seed : schedules(c)) {
    emulator::set_seed(seed);
    check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = 90}, .kernel = kernel, .pass = pass});
  }
}

/// The kernels of a pass share the cases: of `shares` neighbours this one takes those from `first`, `taken` of them. The
/// covering arrays of tests/fuzz take every option through every kernel, and find the planted bugs; the contract's cases
/// are the sizes and values at which kernels broke once. In the long tail each takes all.
inline std::vector<Case> share_of(std::vector<Case> cases, std::size_t shares, std::size_t first, std::size_t taken = 1) {
  if (with_long_tail()) return cases;
  std::size_t count = 0;
  std::erase_if(cases, [&](const Case&) { return (shares + count++ % shares - first) % shares >= taken; });
  return cases;
}

/// The same for kernels with rings and roles, which take the cases that show a lost order first (those of
/// tools/plant_bugs.py), too.
inline std::vector<Case> telling_share_of(std::vector<Case> cases, std::size_t shares, std::size_t first) {
  const std::vector<Case> shared = share_of(cases, shares, first);
  std::erase_if(cases, [&](const Case& c) {
    const auto has = [&](const char* part) { return c.name.find(part) != std::string::npos; };
    return std::none_of(shared.begin(), shared.end(), [&](const Case& other) { return other.name == c.name; }) &&
           !(has("plain") || has("tile_multiple") || has("long_") || has("causal_square") || has("head_dim_128") ||
             has("head_dim_256") || has("packed_causal") || has("nan_value") || has("everything"));
  });
  return cases;
}

/// Every other case: for kernels that nothing depends on but a comparison, and masks that other kernels take, too.
inline std::vector<Case> every_other(std::vector<Case> cases) { return share_of(std::move(cases), 2, 0); }

/// The cases of which the kernel's way to a result depends on being asked for the same bits in every run.
inline std::vector<Case> deterministic(std::vector<Case> cases) {
  for (Case& c : cases) c.problem.deterministic = true;
  return cases;
}

/// A NaN in dO or Q reaches no key that its query does not see, or that dropout has taken from it; nor keys that nobody
/// sees. A NaN in a key reaches no query past the used length.
inline std::vector<Case> nan_gradients(Dtype dtype) {
  std::vector<Case> cases;
  for (Case c : contract_cases(dtype)) {
    if (c.name == "seqused") c.name = "nan_key_seqused_causal", c.nan_key = 20, cases.push_back(c);
    if (c.name == "sink") {  // rows that see no key have the sink's logit as lse
      Case empty = c;
      empty.name = "nan_query_sink_empty", empty.nan_query = 2, empty.problem.causal = true;
      empty.problem.seq_q = empty.problem.seq_kv + 5;
      cases.push_back(empty);
    }
    if (c.name != "causal" && c.name != "dropout" && c.name != "key_lengths") continue;
    Case query = c;
    query.name = "nan_query_" + c.name, query.nan_query = 5;
    c.name = "nan_dout_" + c.name, c.nan_dout = 5;
    cases.push_back(c);
    cases.push_back(query);
  }
  return cases;
}

/// A score of -inf by a program hides a key from a row as a mask does, also where the row's lse is NaN: its query holds
/// one, or it sees a key that does. Key 98 is hidden from the one row that sees both it and key 100.
inline std::vector<Case> nan_beside_hidden_scores(Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, dtype);
    c.problem.heads_kv = 1, c.program = CaseProgram::hides;
    change(c, c.problem);
    describe_program(c);
    cases.push_back(std::move(c));
  };
  add("nan_query_hides", [](Case& c, Problem&) { c.nan_query = 5; });
  add("nan_key_hides", [](Case& c, Problem& p) { c.nan_key = 100, p.window_left = 2, p.causal = true; });
  // Visible keys whose probability is too small for a float: NaN of dout reaches their biases.
  add("nan_dout_hides_not",
      [](Case& c, Problem& p) { c.nan_dout = 5, c.dbias = true, p.scale = 8, p.bias = over(p, true, true, true); });
  return cases;
}

/// The contract's case of that name.
inline Case contract_case(const char* name, Dtype dtype) {
  const std::vector<Case> cases = contract_cases(dtype);
  return *std::find_if(cases.begin(), cases.end(), [&](const Case& c) { return c.name == name; });
}

/// One sequence of documents whose borders `bounds` numbers a key describe, long enough for many tiles.
inline Case documents_case(const char* name, std::int64_t seq, std::int64_t document, int bounds,
                           void (*change)(Case&, Problem&)) {
  Case c = base(name, Dtype::bfloat16);
  c.problem.batch = 1, c.problem.seq_q = c.problem.seq_kv = seq, c.document = document;
  c.problem.hidden_rows.bounds = bounds;
  change(c, c.problem);
  make_masks_dense(c.problem);
  return c;
}

/// Tiles that have fewer chunks of 16 bytes than a block of eight warps has threads.
inline std::vector<Case> narrow_cases() {
  Case c;
  c.problem = {
      .batch = 1, .seq_q = 130, .seq_kv = 140, .heads_q = 1, .heads_kv = 1, .dtype = Dtype::bfloat16, .softcap = 4};
  Case queries = c, values = c;
  queries.name = "head_dim_16", queries.problem.head_dim = 16;
  values.name = "head_dim_64_16", values.problem.head_dim = 64, values.problem.head_dim_v = 16;
  return {queries, values};
}

/// A packed sequence that begins past what 16 bits can count; the one before it has keys and no queries.
inline Case far_case(Dtype dtype) {
  Case c;
  c.name = "far";
  c.problem = {.batch = 2, .seq_q = 3, .seq_kv = 40000, .heads_q = 1, .heads_kv = 1, .head_dim = 8, .dtype = dtype};
  c.problem.packed = c.problem.causal = true;
  c.cu_seqlens_q = {0, 0, 3}, c.cu_seqlens_kv = {0, 40000, 40005};
  c.problem.total_q = 3, c.problem.total_kv = 40005;
  return c;
}

}  // namespace flash_attention::testing
