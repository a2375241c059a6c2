// The generator's promise: every pair of levels that a problem can have occurs in its covering array.
#include "fuzz/generator/cover.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "fuzz/generator/draw_case.h"
#include "fuzz/generator/problems.h"
#include "fuzz/generator/sight.h"
#include "fuzz/generator/vary.h"
#include "support/long_tail.h"

namespace flash_attention::fuzz {
namespace {

constexpr const char* kernels[] = {"cpu/prefill", "cpu/backward", "decode/sm80", "backward/sm90"};

int num_levels(int factor) { return static_cast<int>(levels_of(static_cast<Factor>(factor)).size()); }

/// Written out once more, so that a pair that is lost by the generator's own rule is seen.
bool possible(Factor a, std::string_view x, Factor b, std::string_view y) {
  const auto off_without = [&](Factor detail, Factor option) {
    return a == option && b == detail ? (x == "off") == (y == "unused") : true;
  };
  const auto needs = [&](Factor gradient, std::string_view level, Factor option) {
    const bool forwards = a == option && b == gradient && y == level,
               backwards = b == option && a == gradient && x == level;
    return !(forwards && (x == "off" || x == "unused")) && !(backwards && (y == "off" || y == "unused"));
  };
  const bool weighs = b == slopes || b == sinks;
  if (a == inputs && weighs && x.starts_with("nan_") && y.starts_with("strong")) return false;  // 0 * NaN
  const auto both = [&](Factor f, std::string_view level, Factor g, std::string_view other) {
    return (a == f && x == level && b == g && y == other) || (a == g && x == other && b == f && y == level);
  };
  for (const Factor of_packed : {bounds, tail}) {
    const bool full = (a == paged && x == "full" && b == of_packed && y != "unused") ||
                      (b == paged && y == "full" && a == of_packed && x != "unused");
    if (full) return false;
  }
  for (const Factor length : {queries, keys}) {
    for (const std::string_view level : {"prime", "edge", "long"})
      if (both(batch, "many", length, level)) return false;
  }
  if (a == bounds && b == tail && (x == "unused") != (y == "unused")) return false;
  if (both(paged, "full", packed, "on") || both(batch, "0", tail, "some")) return false;
  if (both(dprogram, "on", program, "off") || both(dprogram, "on", program, "mask")) return false;
  if (both(kv_dtype, "int8", inputs, "nan_key") || both(kv_dtype, "int8", inputs, "nan_value")) return false;
  if (both(kv_scales, "head", layout, "broadcast") || both(kv_scales, "token", layout, "broadcast")) return false;
  for (const std::string_view scales : {"none", "tensor", "head"}) {
    if (both(narrow_queries, scales, kv_dtype, "int8") || both(narrow_queries, scales, latent, "on")) return false;
    if (!needs(narrow_queries, scales, kv_dtype) || !needs(narrow_queries, scales, kv_scales)) return false;
  }
  if (both(latent, "on", head_dim_v, "same") || both(latent, "on", head_dim_v, "larger")) return false;
  if (both(latent, "on", head_dim, "8") || both(latent, "on", head_dim, "any")) return false;
  if (both(seqused_kv, "on", paged, "full") || both(seqused_kv, "off", paged, "used")) return false;
  return off_without(tail, packed) && off_without(page_size, paged) && off_without(hidden_shape, hidden_rows) &&
         off_without(block_shape, block_mask) && off_without(bias_shape, bias) && off_without(slopes, alibi) &&
         off_without(mask_shape, mask) && off_without(bounds, packed) && off_without(sinks, sink) &&
         off_without(kv_scales, kv_dtype) && needs(dbias, "on", bias) && needs(dsink, "on", sink) &&
         needs(dbias, "on", bias_shape) && needs(dsink, "on", sinks) && needs(inputs, "infinite_bias", bias) &&
         needs(inputs, "infinite_bias", bias_shape);
}

/// In a problem without rows or keys a pair counts for nothing, unless that is what it is about. Rows that share a
/// configuration, and such that do not: one of the two for each kernel, both in the long tail.
TEST(Cover, EveryPairOccurs) {
  int count = 0;
  for (const char* kernel : kernels) {
    const bool alone = ++count % 2 == 0;
    for (const int share : {1, 8}) {
      if (alone != (share == 1) && !testing::with_long_tail()) continue;
      const Domain domain = domain_of(kernel);
      std::set<std::array<int, 4>> seen;
      for (const Row& row : cover(domain, share, 7)) {
        for (int a = 0; a < num_factors; ++a) ASSERT_GE(row[a], 0) << name_of(static_cast<Factor>(a));
        for (int a = 0; a < num_factors; ++a) {
          for (int b = a + 1; b < num_factors; ++b)
            if (!is_blank(row) || is_blank(a, row[a]) || is_blank(b, row[b])) seen.insert({a, row[a], b, row[b]});
        }
      }
      for (int a = 0; a < num_factors; ++a) {
        for (int b = a + 1; b < num_factors; ++b) {
          for (int x = 0; x < num_levels(a); ++x) {
            for (int y = 0; y < num_levels(b); ++y) {
              const Factor f = static_cast<Factor>(a), g = static_cast<Factor>(b);
              const bool allowed = domain.has(a, x) && domain.has(b, y) && possible(f, levels_of(f)[x], g, levels_of(g)[y]);
              EXPECT_EQ(seen.contains({a, x, b, y}), allowed) << kernel << ": " << name_of(f) << " " << levels_of(f)[x]
                                                              << " with " << name_of(g) << " " << levels_of(g)[y];
            }
          }
        }
      }
    }
  }
}

/// Lists of keys beside everything else, and beside each other.
TEST(Cover, EveryPairWithListsOccurs) {
  for (const auto& [kernel, share] : {std::pair{"forward/listed", 1}, std::pair{"backward/listed", 5}}) {
    std::set<std::string> seen;
    const std::vector<GeneratedProblem> all = problems(kernel, share, 7);
    const auto name = [](ListFactor factor, int level) {
      return std::to_string(factor) + std::string(levels_of(factor)[level]);
    };
    for (const GeneratedProblem& g : all) {
      ASSERT_TRUE(g.lists.has_value());
      EXPECT_EQ((*g.lists)[list_kind], (*all[g.number / share * share].lists)[list_kind]);  // one configuration
      EXPECT_EQ(g.c.problem.key_list.kind == KeyListKind::blocks, is(*g.lists, list_kind, "blocks"));
      EXPECT_LE(g.c.problem.packed ? g.c.problem.key_list.block_q : 1, 1);
      for (int a = 0; a < num_list_factors; ++a) {
        const std::string own = name(static_cast<ListFactor>(a), (*g.lists)[a]);
        for (int f = 0; f < num_factors; ++f)
          if (!is_blank(g.row) || is_blank(f, g.row[f]))
            seen.insert(own + " " + std::to_string(f) + "." + std::to_string(g.row[f]));
        for (int b = 0; b < num_list_factors; ++b)
          if (!is_blank(g.row)) seen.insert(own + " " + name(static_cast<ListFactor>(b), (*g.lists)[b]));
      }
    }
    const Domain domain = domain_of(kernel);
    const std::vector<Row> rows = cover(domain, share, 7);
    const auto some_row = [&](int f, int level) {
      return std::any_of(rows.begin(), rows.end(), [&](const Row& row) { return row[f] == level; });
    };
    for (int a = 0; a < num_list_factors; ++a) {
      for (int x = 0; x < static_cast<int>(levels_of(static_cast<ListFactor>(a)).size()); ++x) {
        const std::string own = name(static_cast<ListFactor>(a), x);
        const bool shared = own == name(list_block_q, 2) || own == name(list_block_q, 3);
        const bool of_queries = own == name(list_heads, 2);
        for (int f = 0; f < num_factors; ++f) {
          for (int y = 0; y < num_levels(f); ++y) {
            const bool of_packed = (f == packed && y == 1) || ((f == bounds || f == tail) && y > 0);
            if (!some_row(f, y) || (shared && of_packed) || (of_queries && f == group && y == 0)) continue;
            EXPECT_TRUE(seen.contains(own + " " + std::to_string(f) + "." + std::to_string(y)))
                << kernel << ": " << own << " with " << name_of(static_cast<Factor>(f)) << " "
                << levels_of(static_cast<Factor>(f))[y];
          }
        }
        for (int b = 0; b < num_list_factors; ++b) {
          for (int y = 0; a != b && y < static_cast<int>(levels_of(static_cast<ListFactor>(b)).size()); ++y) {
            const bool blocks_a = a >= list_block_q ? x > 0 : a == list_kind ? x == 1 : of_queries;
            const bool keys_a = a >= list_block_q ? x == 0 : a == list_kind && x == 0;
            const bool blocks_b = b >= list_block_q ? y > 0 : b == list_kind ? y == 1 : b == list_heads && y == 2;
            const bool keys_b = b >= list_block_q ? y == 0 : b == list_kind && y == 0;
            EXPECT_EQ(seen.contains(own + " " + name(static_cast<ListFactor>(b), y)),
                      !(blocks_a && keys_b) && !(keys_a && blocks_b))
                << kernel << ": " << own << " with " << name(static_cast<ListFactor>(b), y);
          }
        }
      }
    }
    EXPECT_LE(all.size(), rows.size() * 3 / 2) << "lists cost too many problems";
  }
}

/// A domain without an option has no use for what says more about it.
TEST(Cover, RowsAreWholeWhereADomainIsNarrow) {
  Domain domain = domain_of("cpu/prefill");
  domain.only(bias, {"off"}).only(mask, {"off"}).only(packed, {"off"}).only(sink, {"off"}).only(paged, {"used"});
  const std::vector<Row> rows = cover(domain, 4, 3);
  ASSERT_FALSE(rows.empty());
  for (const Row& row : rows) {
    for (int a = 0; a < num_factors; ++a) ASSERT_GE(row[a], 0) << name_of(static_cast<Factor>(a));
    EXPECT_TRUE(row.is(bias_shape, "unused") && row.is(seqused_kv, "on") && !row.is(page_size, "unused"));
  }
}

TEST(Cover, IsTheSameForTheSameSeed) {
  const auto text = [](std::uint64_t seed) {
    std::string all;
    for (const Row& row : cover(domain_of("cpu/prefill"), 4, seed)) all += to_string(row) + "\n";
    return all;
  };
  EXPECT_EQ(text(3), text(3));
  EXPECT_NE(text(3), text(4));
}

/// Rows of one configuration differ only in what is known when a kernel runs.
TEST(Cover, RowsShareTheirConfiguration) {
  const std::vector<Row> rows = cover(domain_of("forward/sm90"), 5, 1);
  ASSERT_EQ(rows.size() % 5, 0u);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    for (int factor = 0; factor < num_compiled; ++factor) EXPECT_EQ(rows[n][factor], rows[n - n % 5][factor]);
  }
}

/// A level is worth something only if the problem has it: no option may get lost between the row and the call.
void expect_levels(const GeneratedProblem& g) {
  const Problem& p = g.c.problem;
  const Row& row = g.row;
  SCOPED_TRACE(g.c.name);
  EXPECT_EQ(p.packed, row.is(packed, "on"));
  EXPECT_EQ(p.page_size != 0, !row.is(paged, "off"));
  EXPECT_EQ(p.seqused_kv, row.is(seqused_kv, "on"));
  EXPECT_EQ(p.left_padding, row.is(left_padding, "on"));
  EXPECT_EQ(p.bias.present, !row.is(bias, "off"));
  EXPECT_EQ(p.mask.present, row.is(mask, "on"));
  EXPECT_EQ(p.hidden_rows.bounds != 0, !row.is(hidden_rows, "off"));
  EXPECT_EQ(p.block_mask.block_q != 0, row.is(block_mask, "on"));
  EXPECT_EQ(p.alibi, row.is(alibi, "on"));
  EXPECT_EQ(p.sink, row.is(sink, "on"));
  EXPECT_EQ(p.softcap > 0, !row.is(softcap, "off"));
  EXPECT_EQ(p.dropout_p > 0, !row.is(dropout, "off"));
  EXPECT_EQ(p.window_left >= 0, row.level(window).find("left") != std::string_view::npos || row.is(window, "both"));
  EXPECT_EQ(p.causal, row.level(window).starts_with("causal"));
  EXPECT_EQ(p.attention_chunk != 0, row.is(chunk, "on"));
  EXPECT_EQ(g.c.dbias, row.is(dbias, "on"));
  EXPECT_EQ(p.program.empty(), row.is(program, "off"));
  EXPECT_EQ(p.program_gradients != 0, row.is(dprogram, "on"));
  EXPECT_EQ(p.kv_dtype.has_value(), !row.is(kv_dtype, "off"));
  EXPECT_EQ(p.kv_scales == ScaleKind::token, row.is(kv_scales, "token"));
  EXPECT_EQ(p.q_dtype.has_value(), !row.is(narrow_queries, "off"));
  EXPECT_EQ(p.q_scales == ScaleKind::head, row.is(narrow_queries, "head"));
  EXPECT_EQ(p.latent, row.is(latent, "on"));
  EXPECT_EQ(p.invariant, row.is(invariant, "on"));
  EXPECT_EQ(p.batch == 0, row.is(batch, "0"));
  EXPECT_EQ(p.batch > 32, row.is(batch, "many"));
  if (p.packed) {
    EXPECT_EQ(p.total_q > g.c.cu_seqlens_q.back(), row.is(tail, "some"));
  }
}

TEST(Cover, ProblemsHaveTheirLevels) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const GeneratedProblem& g : problems(pass == Pass::forward ? "cpu/prefill" : "cpu/backward", 4, 11)) {
      expect_levels(g);
      EXPECT_NO_THROW(make_plan(g.c.problem, pass, device_info({}))) << g.c.name;
    }
  }
}

/// The last kernel of every list takes what no other does.
TEST(Cover, EveryProblemHasAKernelOnEveryGpu) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const GeneratedProblem& g : problems(pass == Pass::forward ? "forward/portable" : "backward/portable", 4, 11)) {
      for (const int arch : {75, 80, 90, 120})
        EXPECT_NO_THROW(make_plan(g.c.problem, pass, typical_gpu(arch))) << "sm_" << arch << ": " << g.c.name;
    }
  }
}

/// A variant has the options of its problem and levels that go together, is the same when it is asked for again, and is
/// another problem.
TEST(Cover, VariantsShareTheirConfiguration) {
  const Domain domain = domain_of("forward/sm90");
  const std::vector<GeneratedProblem> all = problems(domain, 4, 11);
  std::set<std::string> rows;
  for (std::size_t n = 0; n < all.size(); n += 3) {
    for (int variant = 1; variant <= 3; ++variant) {
      const GeneratedProblem other = vary(all[n], domain, 4, variant);
      EXPECT_EQ(other.c, vary(all[n], domain, 4, variant).c);
      EXPECT_NE(other.c, all[n].c);
      EXPECT_EQ(other.c.problem.head_dim, all[n].c.problem.head_dim);
      EXPECT_EQ(other.c.problem.head_dim_v, all[n].c.problem.head_dim_v);
      expect_levels(other);
      rows.insert(to_string(other.row));
      for (int a = 0; a < num_factors; ++a) {
        EXPECT_TRUE(domain.has(a, other.row[a]));
        if (a < num_compiled) {
          EXPECT_EQ(other.row[a], all[n].row[a]);
        }
        for (int b = 0; b < a; ++b)
          EXPECT_TRUE(go_together(static_cast<Factor>(a), other.row[a], static_cast<Factor>(b), other.row[b]));
      }
    }
    const GeneratedProblem values = vary(all[n], domain, 4, values_alone);
    EXPECT_EQ(values.c.problem, all[n].c.problem);
    EXPECT_NE(values.c.seed, all[n].c.seed);
  }
  EXPECT_GT(rows.size(), all.size() / 2);
}

/// What may lie in a packed tensor or in a cache by chance alone does lie there: tensors without a row, sequences without
/// one between others, pages in no order.
TEST(Cover, ProblemsHaveEmptySequencesAndShuffledPages) {
  int empty_tensors = 0, empty_sequences = 0, shuffled = 0;
  for (const GeneratedProblem& g : problems("cpu/prefill", 4, 11)) {
    const testing::Shape shape(g.c);
    empty_tensors += g.c.problem.packed && shape.rows_q == 0;
    for (const auto& sequence : shape.sequences)
      empty_sequences += g.c.problem.packed && shape.rows_q > 0 && sequence.alloc_q == 0;
    const std::vector<std::int32_t>& table = g.c.page_table;
    shuffled += table.size() > 2 && shape.sequences[0].len_kv > g.c.problem.page_size && table[1] != table[0] + 1;
  }
  EXPECT_GT(empty_tensors, 5);
  EXPECT_GT(empty_sequences, 5);
  EXPECT_GT(shuffled, 5);
}

}  // namespace
}  // namespace flash_attention::fuzz
