#include "fuzz/generator/draw_case.h"

#include <algorithm>

#include "fuzz/generator/dice.h"
#include "fuzz/generator/layouts.h"
#include "fuzz/generator/lengths.h"
#include "fuzz/generator/sight.h"
#include "support/oracle/case_programs.h"

namespace flash_attention::fuzz {
namespace {

using testing::Case;
using testing::Draw;

/// `step`: of what the dimension is a multiple, where the level leaves it open.
std::int64_t dim_of(std::string_view level, std::int64_t step, Dice& dice) {
  const auto multiples = [&](std::int64_t low, std::int64_t high) {
    return step * dice.between((low + step - 1) / step, high / step);
  };
  if (level == "16..56") return multiples(16, 56);
  if (level == "72..120") return multiples(72, 120);
  if (level == "136..192") return step == 8 ? dice.one_of<std::int64_t>({136, 152, 192}) : multiples(144, 192);
  if (level == "200..248") return multiples(200, 248);
  if (level == "any") return dice.one_of<std::int64_t>({1, 4, 7, 20, 59, 75, 101, 131, 203});
  if (level == "264..504") return dice.one_of<std::int64_t>({264, 320, 384, 293, 448});
  if (level == "512..576") return dice.one_of<std::int64_t>({512, 512, 576, 571});
  return std::stoll(std::string(level));
}

std::int64_t other_dim(std::string_view level, std::int64_t dim, std::int64_t step, Dice& dice) {
  const std::int64_t unit = dim % step == 0 ? step : dim % 8 == 0 ? 8 : 1, most = dim <= 256 ? 256 : max_head_dim;
  if (level == "smaller") return dim == unit ? unit : unit * dice.between(1, dim / unit - 1);
  if (level == "larger") return dim == most ? most : unit * dice.between(dim / unit + 1, most / unit);
  return dim;
}

/// Where more hides keys, an edge is far away: two near ones together would leave nothing.
void set_window(Problem& p, const Row& row, Dice& dice) {
  const std::string_view level = row.level(window);
  const std::int64_t reach = std::max<std::int64_t>(testing::packs_keys(p) ? p.total_kv : p.seq_kv, 4);
  const bool many = num_hiding(row) >= many_hiding && dice.between(0, 15) != 0;
  const auto bound = [&] {
    if (many) return dice.one_of<std::int64_t>({reach / 3, reach / 2, dice.between(reach / 4, reach)});
    const std::int64_t few = dice.between(1, 9), any = dice.between(0, reach / 2);
    return dice.one_of<std::int64_t>({0, few, few, any, any, any, reach / 3, reach / 3});
  };
  p.causal = level == "causal" || level == "causal_left";
  if (level == "left" || level == "both" || level == "causal_left") p.window_left = bound();
  if (level == "right" || level == "both") p.window_right = bound();
  if (row.is(chunk, "on")) p.attention_chunk = 1 + bound();
}

std::int64_t blocks(std::int64_t rows, std::int64_t block) { return (rows + block - 1) / block; }

void hide_rows(Case& c, const Row& row, Dice& dice) {
  const testing::Shape shape(c);
  const std::string_view axes = row.level(hidden_shape);
  const bool by_head = axes.find('h') != std::string_view::npos && axes != "shared";
  HiddenRows& hidden = c.problem.hidden_rows;
  hidden.bounds = row.is(hidden_rows, "one") ? 1 : row.is(hidden_rows, "two") ? 2 : 4;
  const bool flat = testing::packs_keys(c.problem);
  const std::int64_t numbers = (flat ? shape.rows_kv : shape.seq_kv) * hidden.bounds;
  if (by_head) hidden.head_stride = numbers;
  if (axes.starts_with("b") && !flat) hidden.batch_stride = (by_head ? shape.heads_kv : 1) * numbers;
  const std::int64_t shortest = num_hiding(row) >= many_hiding ? std::max<std::int64_t>(shape.seq_kv / 2, 1) : 1;
  c.document = dice.one_of<std::int64_t>({0, dice.between(shortest, shortest + 99)});
}

void hide_blocks(Case& c, const Row& row, Dice& dice) {
  const testing::Shape shape(c);
  const std::string_view axes = row.level(block_shape);
  const auto has = [axes](char axis) { return axes.find(axis) != std::string_view::npos; };
  BlockMask& m = c.problem.block_mask;
  m.block_q = dice.one_of<std::int64_t>({1, dice.between(2, 40), 64, 128, 128});
  m.block_kv = dice.one_of<std::int64_t>({m.block_q, m.block_q, 1, dice.between(2, 40), 64, 128});
  m.q_stride = blocks(shape.seq_kv, m.block_kv);
  const std::int64_t of_head = blocks(shape.seq_q, m.block_q) * m.q_stride;
  if (has('h')) m.head_stride = of_head;
  if (has('b')) m.batch_stride = (has('h') ? shape.heads_q : 1) * of_head;
}

Draw draw_of(std::string_view level) {
  if (level == "large") return Draw::large;
  if (level == "peaked") return Draw::peaked;
  if (level == "growing") return Draw::growing;
  if (level == "spike") return Draw::spike;
  if (level == "falling") return Draw::falling;
  if (level == "ties") return Draw::ties;
  if (level == "denormal") return Draw::denormal;
  if (level == "zeros") return Draw::zeros;
  return Draw::normal;
}

void set_inputs(Case& c, const Row& row, Dice& dice) {
  const std::string_view level = row.level(inputs);
  const Problem& p = c.problem;
  const std::int64_t rows_q = std::max<std::int64_t>(p.packed ? p.total_q : p.seq_q, 1);
  const std::int64_t rows_kv = std::max<std::int64_t>(testing::packs_keys(p) ? p.total_kv : p.seq_kv, 1);
  c.draw = draw_of(level);
  if (level == "nan_key") c.nan_key = dice.between(0, rows_kv - 1);
  if (level == "nan_value") c.nan_value = dice.between(0, rows_kv - 1);
  if (level == "nan_query") c.nan_query = dice.between(0, rows_q - 1);
  if (level == "nan_dout") c.nan_dout = dice.between(0, rows_q - 1);
  // Who sees it has no other number left: half of the time that is one sequence of several.
  if (level.starts_with("nan_") && p.batch > 1 && dice.between(0, 1) == 1) c.nan_sequence = dice.between(0, p.batch - 1);
  c.infinite_bias = level == "infinite_bias";
  c.strong_slopes = row.is(slopes, "strong") || row.is(slopes, "strong_batch");
  c.strong_sink = row.is(sinks, "strong");
  c.infinite_sink = row.is(sinks, "infinite");
  c.dlse = row.is(dlse, "on");
  c.dbias = row.is(dbias, "on");
  c.dsink = row.is(dsink, "on");
  c.dprogram = row.is(dprogram, "on");
  c.dropout_seed = dice.word();
  c.dropout_offset = dice.word();
}

void set_scores(Problem& p, const Row& row, Dice& dice) {
  if (row.is(scale, "given")) p.scale = 0.3f;
  if (row.is(scale, "negative")) p.scale = -0.2f;
  if (row.is(scale, "zero")) p.scale = 0.0f;
  if (row.is(softcap, "narrow")) p.softcap = 1.5f;
  if (row.is(softcap, "wide")) p.softcap = dice.one_of({10.0f, 40.0f});
  if (row.is(dropout, "some")) p.dropout_p = 0.15f;
  if (row.is(dropout, "half")) p.dropout_p = 0.5f;
  p.alibi = row.is(alibi, "on");
  if (row.level(slopes).ends_with("batch")) p.alibi_batch_stride = p.heads_q;
  p.sink = row.is(sink, "on");
  p.deterministic = row.is(deterministic, "on");
  p.invariant = row.is(invariant, "on");
}

/// A key is its value and some columns more, multiples of 8: of what is open, most often that of DeepSeek's models.
void set_latent_dims(Problem& p, const Row& row, std::int64_t step, Dice& fixed) {
  p.latent = true;
  p.head_dim = p.head_dim / 8 * 8;
  p.head_dim_v = std::min(other_dim(row.level(head_dim_v), p.head_dim, step, fixed), p.head_dim - 8);
  if (row.is(head_dim, "512..576")) p.head_dim = 576, p.head_dim_v = 512;
}

ScaleKind scales_of(std::string_view level) {
  return level == "none"     ? ScaleKind::none
         : level == "tensor" ? ScaleKind::tensor
         : level == "head"   ? ScaleKind::head
                             : ScaleKind::token;
}

void narrow_inputs(Problem& p, const Row& row) {
  if (row.is(kv_dtype, "off")) return;
  p.kv_dtype = row.is(kv_dtype, "e4m3") ? Dtype::float8_e4m3 : row.is(kv_dtype, "e5m2") ? Dtype::float8_e5m2 : Dtype::int8;
  p.kv_scales = scales_of(row.level(kv_scales));
  if (row.is(narrow_queries, "off")) return;
  p.q_dtype = p.kv_dtype;
  p.q_scales = scales_of(row.level(narrow_queries));
}

/// `fixed` has the same in all problems of a configuration: a program is part of what is compiled.
testing::CaseProgram program_of(std::string_view level, Dice& fixed) {
  using testing::CaseProgram;
  if (level == "score") return fixed.one_of({CaseProgram::distance, CaseProgram::squashed});
  if (level == "mask") return fixed.one_of({CaseProgram::dilated, CaseProgram::documents});
  if (level == "both") return CaseProgram::both;
  return level == "hides" ? CaseProgram::hides : CaseProgram::none;
}

}  // namespace

Case draw_case(const Row& row, std::uint64_t configuration_seed, std::uint64_t seed, const Sizes& sizes) {
  Case c;
  c.name = to_string(row);
  Problem& p = c.problem;
  Dice fixed(configuration_seed), dice(seed);
  c.seed = dice.word();
  p.dtype = row.is(dtype, "float32_fast") ? Dtype::float32 : static_cast<Dtype>(row[dtype]);
  if (row.is(dtype, "float32_fast")) p.precision = Precision::fast;
  // Quick kernels take rows of 8-bit keys that are multiples of 16 bytes.
  const std::int64_t step = row.is(kv_dtype, "off") || fixed.between(0, 3) == 0 ? 8 : 16;
  p.head_dim = dim_of(row.level(head_dim), step, fixed);
  p.head_dim_v = other_dim(row.level(head_dim_v), p.head_dim, step, fixed);
  if (row.is(latent, "on")) set_latent_dims(p, row, step, fixed);
  set_sizes(c, row, sizes, dice);
  set_lengths(c, row, dice);
  set_window(p, row, dice);
  p.alignment = static_cast<Alignment>(row[alignment]);
  set_scores(p, row, dice);
  if (row.is(bias, "off") == false) {
    p.bias = score_tensor(p, row.level(bias_shape), dice.one_of<std::int64_t>({0, 0, 3, 8}));
    p.bias.dtype = row.is(bias, "float32") ? Dtype::float32 : row.is(bias, "float16") ? Dtype::float16 : Dtype::bfloat16;
  }
  if (row.is(mask, "on")) p.mask = score_tensor(p, row.level(mask_shape), dice.one_of<std::int64_t>({0, 0, 5, 16}));
  if (!row.is(hidden_rows, "off")) hide_rows(c, row, dice);
  if (row.is(block_mask, "on")) hide_blocks(c, row, dice);
  lay_out(p, row.level(layout));
  set_inputs(c, row, dice);
  narrow_inputs(p, row);
  c.program = program_of(row.level(program), fixed);
  testing::describe_program(c);
  return c;
}

}  // namespace flash_attention::fuzz
