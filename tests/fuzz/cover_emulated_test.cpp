// Covering arrays in the emulator, one for each kernel: a part of it in `make test`, all of it and several schedules of
// each problem in the long tail. Compiling takes most of the time, so several problems share a configuration. At the end
// every marked branch of the kernel (kernels/ptx/path.cuh) has been taken.
#include <gtest/gtest.h>

#include <regex>

#include "emulator/checks/paths.h"
#include "emulator/host/seed.h"
#include "fuzz/check_problem.h"
#include "jit/embedded.h"

namespace flash_attention::fuzz {
namespace {

constexpr int share = 5;
constexpr Sizes small{.longest = 290, .max_products = 4e6, .max_nan_products = 1e6};
constexpr Sizes longer{.longest = 420, .max_products = 1.6e7, .max_nan_products = 2e6};

/// A part of a kernel's domain, for branches that few problems take; one configuration of it.
struct Narrow {
  Domain (*of)(Domain);
  Sizes sizes = longer;
  int num_sms = 3;
};

/// Without an option that touches every score: kernels have ways of their own for these. More keys than queries under a
/// causal mask: tiles inside of it and at its edge; and NaN that some queries see.
Domain plain(Domain domain, std::string_view dim) {
  domain.only(softcap, {"off"}).only(bias, {"off"}).only(alibi, {"off"}).only(mask, {"off"}).only(dropout, {"off"});
  domain.only(head_dim, {dim}).only(head_dim_v, {"same"}).only(queries, {"edge"}).only(keys, {"long"});
  domain.only(hidden_rows, {"off"})
      .only(block_mask, {"off"})
      .only(program, {"off"})
      .only(kv_dtype, {"off"})
      .only(invariant, {"off"});
  domain.only(packed, {"off"}).only(paged, {"off"}).only(seqused_q, {"off"}).only(batch, {"1"}).only(group, {"1", "2"});
  domain.only(seqused_kv, {"off"}).only(key_lengths, {"off"}).only(left_padding, {"off"});
  domain.only(deterministic, {dim == "128" ? "on" : "off"}).only(window, {"causal"}).only(chunk, {"off"});
  domain.only(alignment, {"bottom_right"});
  return domain.only(scale, {"default", "given"}).only(inputs, {"normal", "growing", "nan_key", "nan_value", "nan_query"});
}
const Narrow plain_64{[](Domain domain) { return plain(domain, "64"); }};
const Narrow plain_128{[](Domain domain) { return plain(domain, "128"); }};
const Narrow plain_256{[](Domain domain) { return plain(domain, "256"); }};
/// Of float32 in three products each, which take the emulator three times as long.
const Narrow split_64{plain_64.of, small};
/// dQ by itself, at a width for which sm_80 has memory in fp32, too.
const Narrow same_bits_64{[](Domain domain) { return plain(domain, "64").only(deterministic, {"on"}); }};

/// Scores beyond a soft cap and far inside of it.
const Narrow soft_cap{[](Domain domain) {
  return plain(domain, "64").only(softcap, {"wide"}).only(inputs, {"normal", "growing"});
}};

/// ALiBi seen both ways, from the diagonal on; above 256 also tiles whose first keys lie far behind it.
Domain both_ways(Domain domain, std::string_view dim) {
  domain = plain(domain, dim).only(alibi, {"on"}).only(slopes, {"strong", "strong_batch"}).only(window, {"none"});
  return domain.only(inputs, {"normal", "growing"});
}
const Narrow slopes_both_ways{[](Domain domain) { return both_ways(domain, "64"); }};
const Narrow wide_slopes{[](Domain domain) { return both_ways(domain, "264..504"); }};

/// A bias alone and its gradient, in large tiles: some are seen by all of their queries.
const Narrow biases{[](Domain domain) {
                      domain = plain(domain, "64").only(bias, {"float32", "float16", "bfloat16"}).only(dbias, {"on"});
                      return domain.only(inputs, {"normal", "nan_key", "infinite_bias"});
                    },
                    longer, 1};

/// Masks that leave blocks of keys out, and some as they are.
const Narrow blocks_of_keys{[](Domain domain) {
  domain = plain(domain, "64").only(block_mask, {"on"}).only(window, {"none"}).only(inputs, {"normal", "nan_value"});
  return domain.only(deterministic, {"on"});
}};

/// Words of intervals and of programs, beside edges that need none; and so many tiles that they are claimed together.
const Narrow words_of_rows{[](Domain domain) {
  return plain(domain, "128").only(hidden_rows, {"four"}).only(deterministic, {"off"}).only(window, {"causal", "both"});
}};
const Narrow words_of_programs{[](Domain domain) {
  return plain(domain, "64").only(program, {"mask"}).only(dprogram, {"off"}).only(window, {"causal", "none"});
}};
const Narrow words_by_claims{[](Domain domain) {
                               domain = plain(domain, "8").only(hidden_rows, {"four"}).only(queries, {"long"});
                               return domain.only(keys, {"few"}).only(group, {"8"}).only(batch, {"3"});
                             },
                             {.longest = 420, .max_products = 4e6},
                             1};

/// Blocks by which the heads of a group differ.
const Narrow blocks_by_heads{[](Domain domain) {
                               domain = plain(domain, "64").only(block_mask, {"on"}).only(block_shape, {"hq", "bhq"});
                               domain.only(group, {"3", "8"}).only(queries, {"long"}).only(keys, {"edge"});
                               return domain.only(window, {"none"}).only(inputs, {"normal"});
                             },
                             small};

/// NaN beside scores of -inf: rows whose lse is NaN, and keys that a program hides from them.
const Narrow hidden_scores{[](Domain domain) {
                             domain = plain(domain, "64").only(program, {"hides"}).only(dprogram, {"off"});
                             domain.only(window, {"left", "causal_left"}).only(queries, {"prime"}).only(keys, {"prime"});
                             return domain.only(inputs, {"nan_key", "nan_query", "nan_value"});
                           },
                           small};

/// The same above 256, where warpgroups share columns.
const Narrow plain_wide{[](Domain domain) { return plain(domain, "264..504"); }};
/// And an option between its products.
const Narrow wide_soft_cap{[](Domain domain) {
  return plain(domain, "264..504").only(softcap, {"wide"}).only(inputs, {"normal", "growing"});
}};
const Narrow wide_blocks{[](Domain domain) {
                           domain = plain(domain, "264..504").only(block_mask, {"on"}).only(window, {"none"});
                           domain.only(key_lengths, {"on"});
                           return domain.only(inputs, {"normal", "nan_value"});  // V holds NaN behind them, too
                         },
                         {.longest = 420, .max_products = 1.6e7}};

/// So many queries that blocks take the longest tile that is left.
const Narrow many_queries{[](Domain domain) { return plain(domain, "8").only(queries, {"long"}).only(keys, {"few"}); },
                          {.longest = 1400, .max_products = 4e6}};

/// So many keys that work tiles share those of a row tile.
const Narrow splits_of_keys{[](Domain domain) {
                              return plain(domain, "64").only(sink, {"off"}).only(window, {"none", "causal"});
                            },
                            {.longest = 2800, .max_products = 4e7},
                            16};

/// One tile has all keys: a task does all that its head needs.
const Narrow one_key_tile{[](Domain domain) {
                            domain = plain(domain, "128").only(deterministic, {"off"}).only(sink, {"off"});
                            return domain.only(queries, {"few", "prime"}).only(inputs, {"nan_query", "normal"});
                          },
                          {.longest = 128, .max_products = 4e6}};

/// Tasks add to dQ in their order: there are no more keys than queries, and more than a tile of them.
const Narrow ordered{[](Domain domain) {
  domain = plain(domain, "64").only(deterministic, {"on"}).only(queries, {"long"}).only(keys, {"long"});
  return domain.only(inputs, {"normal"});
}};
/// And to dK of the same keys.
const Narrow ordered_groups{[](Domain domain) {
  domain = plain(domain, "64").only(deterministic, {"on"}).only(queries, {"long"}).only(keys, {"edge"});
  return domain.only(group, {"8"}).only(inputs, {"normal"});
}};

/// So many queries that those of the first keys come in parts, some of which see none of them.
const Narrow first_keys{[](Domain domain) {
                          domain = plain(domain, "8").only(block_mask, {"on"}).only(window, {"none"}).only(group, {"1"});
                          return domain.only(queries, {"long"}).only(keys, {"edge"}).only(inputs, {"normal", "nan_query"});
                        },
                        {.longest = 2900, .max_products = 4e7}};

/// Several segments of the fixed order.
Domain in_order(Domain domain) {
  return plain(domain, "128").only(invariant, {"on"}).only(deterministic, {"off"}).only(group, {"1"});
}
const Narrow segments{[](Domain domain) {
                        domain = in_order(domain).only(queries, {"prime", "edge"}).only(keys, {"long"});
                        return domain.only(inputs, {"normal", "growing", "nan_value"});
                      },
                      {.longest = 1400, .max_products = 4e7, .max_nan_products = 4e7}};
/// Scores below a soft cap, in the fixed order.
const Narrow capped_in_order{[](Domain domain) {
                               domain = in_order(domain).only(softcap, {"wide"}).only(queries, {"prime", "edge"});
                               return domain.only(keys, {"edge"}).only(inputs, {"normal"});
                             },
                             {.max_products = 1e7}};
const Narrow few_in_order{[](Domain domain) {
                            return in_order(domain).only(queries, {"1", "few"}).only(window, {"none", "causal"});
                          },
                          {.longest = 2400, .max_products = 1e7}};

/// Decode: more blocks share the keys than have their parts in flight at a time.
const Narrow many_parts{[](Domain domain) {
                          domain = plain(domain, "64").only(queries, {"1", "few"}).only(window, {"none"});
                          return domain.only(inputs, {"normal", "growing"});
                        },
                        {.longest = 2400, .max_products = 1e7},
                        24};
const Narrow few_queries{[](Domain domain) {
  return plain(domain, "64").only(softcap, {"wide"}).only(queries, {"1", "few"}).only(window, {"none", "causal"});
}};
/// Pages that end inside of tiles, of which there are several.
const Narrow small_pages{[](Domain domain) {
  domain = plain(domain, "64").only(paged, {"used"}).only(page_size, {"few"}).only(seqused_kv, {"on"});
  return domain.only(queries, {"1", "few"}).only(group, {"3", "8"}).only(batch, {"2", "3"});
}};
/// Pages that are boxes, which end in the middle of them.
const Narrow boxes_of_pages{[](Domain domain) {
  domain = plain(domain, "64").only(paged, {"used"}).only(page_size, {"16", "64", "whole"}).only(seqused_kv, {"on"});
  return domain.only(queries, {"1", "few"}).only(group, {"3", "8"}).only(batch, {"2", "3"});
}};
/// Half of a tile's rows, or fewer, of more than 64 columns.
const Narrow few_rows{[](Domain domain) {
  domain = plain(domain, "128").only(queries, {"1"}).only(group, {"1", "3"}).only(window, {"none", "causal"});
  return domain.only(batch, {"2", "3"}).only(inputs, {"normal", "growing", "nan_value"});
}};
/// All rows of a tile.
const Narrow all_rows{[](Domain domain) {
  return plain(domain, "128").only(queries, {"few"}).only(group, {"8"}).only(inputs, {"normal", "growing"});
}};
const Narrow many_sequences{[](Domain domain) {
  domain = plain(domain, "64").only(batch, {"many"}).only(queries, {"1", "few", "0"}).only(keys, {"few"});
  return domain.only(packed, {"on"}).only(group, {"3", "8"});
}};

/// Latent keys in parts, in tiles of which some are seen by all of their queries.
const Narrow latent_parts{[](Domain domain) {
                            domain = plain(domain, "512..576").only(head_dim_v, {"smaller"});
                            return domain.only(queries, {"1", "few"}).only(inputs, {"normal", "growing", "nan_value"});
                          },
                          longer, 11};

const Narrow latent_softcap{[](Domain domain) { return latent_parts.of(domain).only(softcap, {"wide"}); }};

/// Queries in 8 bits over long rows of keys: references that are raised, sums that are taken over, rows with NaN.
Domain narrow_keys(Domain domain) {
  domain = plain(domain, "64").only(kv_dtype, {"e4m3", "e5m2"});
  return domain.only(inputs, {"normal", "growing", "nan_key", "nan_value"});
}
const Narrow narrow_plain{[](Domain domain) { return narrow_keys(domain); },
                          {.longest = 3300, .max_products = 4e7, .max_nan_products = 8e6}};
const Narrow narrow_packed{[](Domain domain) {
                             domain = narrow_keys(domain).only(packed, {"on"}).only(batch, {"2", "3"});
                             return domain.only(window, {"none", "causal_left"}).only(queries, {"edge", "prime"});
                           },
                           small};

/// So many rows for each head of keys that V of later heads is transposed under the tiles of earlier ones.
const Narrow narrow_late{[](Domain domain) {
                           domain = narrow_keys(domain).only(packed, {"off"}).only(queries, {"long"}).only(keys, {"few"});
                           return domain.only(group, {"8"}).only(batch, {"3"}).only(window, {"none", "causal"});
                         },
                         {.longest = 420, .max_products = 4e6},
                         1};

struct Part {
  const char* kernel;
  int configurations;  // of all that it takes, in `make test`
  std::vector<Narrow> narrow;
};

/// The marks of all kernels, from their sources.
std::set<std::string> all_paths() {
  std::set<std::string> names;
  // Kernels that share a file have names of their own: path<split ? "forward/tf32 ..." : "forward/sm80 ...">.
  const std::regex mark("ptx::path<[^>]*>"), quoted("\"([^\"]+)\"");
  for (const jit::EmbeddedFile& file : jit::embedded_files()) {
    const std::string text(file.text);
    for (std::sregex_iterator m(text.begin(), text.end(), mark), end; m != end; ++m) {
      const std::string of_mark = m->str();
      for (std::sregex_iterator q(of_mark.begin(), of_mark.end(), quoted); q != end; ++q) names.insert(q->str(1));
    }
  }
  return names;
}

std::set<std::string> paths_of(const std::string& kernel) {
  static const std::set<std::string> all = all_paths();  // to search the sources takes a third of a second
  std::set<std::string> names = all;
  std::erase_if(names, [&](const std::string& name) { return !name.starts_with(kernel + " "); });
  return names;
}

class CoverEmulated : public ::testing::TestWithParam<Part> {
 protected:
  const std::string kernel_ = GetParam().kernel;
  const testing::Target target_{
      .device = {.kind = DeviceKind::emulator, .emulated_arch = emulated_arch_of(kernel_)},
      .kernel = kernel_,
      .pass = kernel_.starts_with("backward") ? Pass::backward : Pass::forward};

  /// So many configurations of which the kernel takes the first problem; all in the long tail.
  void run(const Domain& domain, int configurations, const Sizes& sizes) {
    const int max_failures = GTEST_FLAG_GET(fail_fast) ? 0 : 3;
    int begun = 0;
    bool taken = false;
    for (GeneratedProblem& problem : problems_of(domain, sizes)) {
      if (kernel_.ends_with("/fp32")) problem.c.problem.precision = Precision::ieee;
      if (problem.number % share == 0) {
        taken = testing::with_long_tail() || testing::rejection(problem.c, target_).empty();
        begun += taken;
      }
      if (failed_ > max_failures || (!testing::with_long_tail() && begun > configurations)) break;
      if (!taken) continue;
      problem.c.narrow_products = testing::rounds_products(problem.c, taken_by(problem.c));
      const testing::Expected expected = testing::expect(problem.c, testing::is_backward(target_.pass));
      for (int schedule = 0; schedule < (testing::with_long_tail() ? 3 : 1); ++schedule) {
        emulator::set_seed(static_cast<std::uint64_t>(problem.number * 3 + schedule));
        failed_ += !check_problem(problem, taken_by(problem.c), expected);
      }
    }
  }

  /// Those of a domain, with lists of keys where the kernel takes nothing else.
  std::vector<GeneratedProblem> problems_of(const Domain& domain, const Sizes& sizes) const {
    return kernel_.ends_with("/listed") ? problems(kernel_, share, array_seed(), sizes)
                                        : problems(domain, share, array_seed(), sizes);
  }

  /// What the kernel does not take goes to the planner's choice.
  testing::Target taken_by(const testing::Case& c) const {
    testing::Target target = target_;
    if (!testing::rejection(c, target).empty()) target.kernel.clear();
    return target;
  }

  int failed_ = 0;
};

TEST_P(CoverEmulated, MatchesTheOracleAndTakesEveryPath) {
  emulator::set_num_sms(3);  // so that a block takes several tiles, one after another
  Domain domain = domain_of(kernel_);
  if (kernel_ == "forward/sm90" && !testing::with_long_tail()) domain.only(invariant, {"off"});  // `segments` are enough
  run(domain, GetParam().configurations, small);
  for (const Narrow& narrow : GetParam().narrow) {
    emulator::set_num_sms(narrow.num_sms);
    run(narrow.of(domain_of(kernel_)), 1, narrow.sizes);
  }
  emulator::set_num_sms(0);
  if (HasFailure() || array_seed() != 1) return;  // other seeds may miss a branch
  const std::set<std::string> taken = emulator::paths_taken();
  for (const std::string& path : paths_of(kernel_)) EXPECT_TRUE(taken.contains(path)) << path << " was not taken";
  EXPECT_FALSE(paths_of(kernel_).empty());
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, CoverEmulated,
    ::testing::Values(
        Part{"forward/portable", 2, {plain_64}}, Part{"forward/sm80", 3, {plain_64, soft_cap}},
        Part{"forward/tf32", 1, {split_64, soft_cap}}, Part{"backward/tf32", 1, {split_64, plain_128}},
        Part{"forward/fp32", 1, {plain_64, soft_cap}}, Part{"backward/fp32", 1, {split_64, same_bits_64}},
        Part{"forward/sm90",
             3,
             {plain_64, plain_256, soft_cap, slopes_both_ways, many_queries, splits_of_keys, segments, capped_in_order,
              blocks_of_keys, words_of_rows, words_of_programs, words_by_claims, plain_wide, wide_soft_cap, wide_slopes,
              wide_blocks}},
        Part{"forward/sm100", 2, {plain_64, plain_128}},
        Part{"decode/sm80", 3, {few_queries, all_rows, many_parts, many_sequences, small_pages, few_in_order}},
        Part{"decode/sm90", 2, {many_parts, boxes_of_pages, few_rows}},
        Part{"decode/mla_sm90", 1, {latent_parts, latent_softcap}},
        Part{"forward/sm90_fp8", 1, {narrow_plain, narrow_packed, narrow_late}}, Part{"forward/sm89_fp8", 3, {narrow_packed}},
        Part{"backward/portable", 2, {plain_64}},
        Part{"forward/listed", 2, {}}, Part{"backward/listed", 2, {}},
        Part{"backward/sm80", 2, {plain_64, plain_128, biases, blocks_of_keys, blocks_by_heads, hidden_scores}},
        Part{"backward/sm90",
             2,
             {plain_64, plain_128, plain_256, plain_wide, one_key_tile, ordered, ordered_groups, hidden_scores,
              first_keys}}),
    [](const auto& part) {
      std::string name = part.param.kernel;
      name[name.find('/')] = '_';
      return name;
    });

/// What decode/sm80 takes of forward/listed's problems: 16 bits, and scores that do not depend on a key's place.
Domain decoded_lists() {
  Domain domain = domain_of("forward/listed");
  domain.without(dtype, {"float32"}).only(bias, {"off"}).only(bias_shape, {"unused"}).only(alibi, {"off"});
  domain.only(slopes, {"unused"}).only(mask, {"off"}).only(mask_shape, {"unused"}).only(dropout, {"off"});
  domain.without(inputs, {"infinite_bias"}).without(layout, {"odd", "fours"}).without(scale, {"negative", "zero"});
  return domain.without(head_dim, {"any"});
}

/// Lists of keys on tensor cores: a few problems in `make test`.
TEST(CoverEmulatedLists, DecodeMatchesTheOracle) {
  constexpr int in_short = 10, max_failures = 3;
  const testing::Target target{.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = "decode/sm80"};
  emulator::set_num_sms(3);
  int taken = 0, failed = 0;
  for (GeneratedProblem& problem : listed_problems(decoded_lists(), share, array_seed(), small)) {
    if (failed > max_failures || (!testing::with_long_tail() && taken == in_short)) break;
    if (!testing::rejection(problem.c, target).empty()) continue;
    ++taken;
    problem.c.narrow_products = testing::rounds_products(problem.c, target);
    const testing::Expected expected = testing::expect(problem.c, false);
    emulator::set_seed(static_cast<std::uint64_t>(problem.number));
    failed += !check_problem(problem, target, expected);
  }
  emulator::set_num_sms(0);
  EXPECT_GE(taken, in_short);
}

}  // namespace
}  // namespace flash_attention::fuzz
