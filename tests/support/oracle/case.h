#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/formula.h"
#include "flash_attention/attention.h"

namespace flash_attention::testing {

/// How the random inputs are drawn.
enum class Draw {
  normal,
  large,     // logits shifted by about +-120
  peaked,    // one key of each row dominates
  growing,   // scores rise along the keys, so that every tile brings a new maximum
  spike,     // one very large score in the last keys
  falling,   // the maximum comes first and everything after it is nothing
  ties,      // each score is one of two values
  denormal,  // numbers that the type holds with few bits
  zeros,     // Q and K are -0, and so are half of V and dO
  huge,      // scores of 2^12 and far more: a row is the mean of a few values, for whose number lse has no room
};

/// Programs of cases: support/oracle/case_programs.h.
enum class CaseProgram {
  none,
  distance,   // a score less the distance of its positions times a number of the head
  squashed,   // tanh, and a number of the diagonal
  dilated,    // every second, third or fourth diagonal is hidden
  documents,  // positions of one document see each other
  both,       // squashed, and diagonals hidden that differ by head
  hides,      // some scores become -inf
};

/// One point of the contract: a problem, its lengths and how its inputs look. Values are drawn from `seed`.
struct Case {
  std::string name;
  Problem problem;
  Draw draw = Draw::normal;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, key_lengths, left_padding;
  std::vector<std::int32_t> sequence_windows;  // [batch, 2]
  std::vector<std::int32_t> page_table;        // [batch, page_table_stride] where there are pages
  std::int64_t nan_sequence = -1;              // NaN is in this sequence alone; -1: in each
  std::int64_t nan_key = -1;     // this key of each sequence is NaN: it reaches the queries that see it, and no others
  bool values_begin_keys = false;  // V is the first columns of K, in the same memory; the strides say so, too
  std::int64_t nan_value = -1;   // the same for a value
  std::int64_t nan_query = -1;   // this query is NaN: it reaches the keys that it sees, and no others
  std::int64_t nan_dout = -1;    // the same for the gradient of its output
  bool lowest_bias = false;      // many biases are the lowest float, among them all of some rows
  bool infinite_bias = false;    // many biases are -inf, among them all of some rows and all of a tile of others
  bool strong_slopes = false;    // ALiBi lets a row see no more than a few keys
  bool strong_sink = false;      // sinks beside which the keys weigh little, or the sink does
  bool infinite_sink = false;    // every other sink is -inf
  std::int64_t document = 0;     // hidden rows, or the mask, make documents of so many keys; 0: they are random
  bool power_scales = false;     // the scales of 8-bit keys and values are powers of two
  bool narrow_products = false;  // P is rounded to e4m3, and sums of 8-bit products are cut to 14 bits on the way
  bool dlse = false;             // backward with a gradient through lse
  bool dbias = false;
  bool dsink = false;
  CaseProgram program = CaseProgram::none;
  bool dprogram = false;   // backward with the gradient of what the program's score reads
  std::uint64_t seed = 1;  // of the inputs
  std::uint64_t dropout_seed = 0x1234567890abcdefull;
  std::uint64_t dropout_offset = 0x0000000300000007ull;

  bool operator==(const Case&) const = default;
};

/// Whether keys lie end to end. In pages, sequences lie apart: b has rows b * seq_kv and on.
bool packs_keys(const Problem& problem);

/// The sizes a Case really has, without asking the code under test for its defaults.
struct Shape {
  explicit Shape(const Case& c);

  std::int64_t batch, rows_q, rows_kv;  // rows of the tensors: packed totals, or batch * seq
  std::int64_t seq_q, seq_kv, heads_q, heads_kv, group, dim, dim_v;

  struct Sequence {
    std::int64_t first_q, first_kv;                    // first row in the tensor
    std::int64_t alloc_q, alloc_kv;                    // rows it owns
    std::int64_t len_q, len_kv;                        // rows it uses (seqused)
    std::int64_t visible_kv;                           // keys after key_lengths
    std::int64_t padding_kv;                           // keys before it are hidden
    std::int64_t window_left = -1, window_right = -1;  // the sequence's own

    check::Extent extent() const { return {len_q, len_kv, padding_kv, visible_kv, window_left, window_right}; }
  };
  std::vector<Sequence> sequences;

  bool visible(const Problem& problem, const Sequence& s, std::int64_t i, std::int64_t j) const;  // all but the mask tensor
};

/// Values in their logical order, already rounded to the type they are stored in:
/// q [rows_q, heads_q, dim], k, v, dout alike; lse-shaped values [batch, heads_q, seq_q] or packed [heads_q, rows_q];
/// bias and mask [batch|1, heads_q|1, seq_q|1, seq_kv].
struct Inputs {
  std::vector<double> q, k, v, dout, dlse, bias, alibi_slopes, sink;
  std::vector<double> dentropy, dkey_mass;  // of statistics: in the layouts of lse and of key_mass
  std::vector<std::uint8_t> mask;
  // 8-bit keys and values: k and v are what codes and scales are worth; scales of rows are [rows_kv, heads_kv].
  std::vector<double> k_codes, v_codes, k_scale, v_scale;
  std::vector<double> q_codes, q_scale;   // 8-bit queries
  // 4 bits: codes are bytes of two; scales are bytes, or numbers of int4, as its zeros; [rows_kv, heads_kv, dim / group].
  std::vector<double> k_group_scale, v_group_scale, k_group_zero, v_group_zero;
  std::vector<std::int32_t> hidden_rows;  // [batch|1, heads_kv|1, seq_kv, bounds], packed [heads_kv|1, rows_kv, bounds]
  std::vector<std::uint8_t> block_mask;   // [batch|1, heads_q|1, blocks of queries|1, blocks of keys]
  std::vector<std::uint8_t> bit_mask;     // as the problem's bit_mask says
  std::vector<std::int32_t> bit_mask_offsets;
  std::vector<std::int32_t> key_list;  // as the problem's key_list says
  std::vector<std::int32_t> key_counts;
  // What a program reads: one tensor, of floats or of ints, and numbers.
  std::vector<double> program_reals, program_scalars;
  std::vector<std::int32_t> program_ints;
};

/// Random inputs of the case. Rows that no query may see, and rows past the used lengths, hold NaN and Inf.
Inputs draw_inputs(const Case& c);

/// Makes q, k and v what 8-bit codes and scales can say, where the case has such queries and keys. What nobody sees has
/// codes and scales of NaN.
void make_narrow(const Case& c, const Shape& shape, Inputs& in);

/// Index into bias, mask and dbias in their logical order; broadcast axes count as size 1.
std::int64_t score_index(const Case& c, const ScoreTensor& tensor, std::int64_t b, std::int64_t h, std::int64_t i,
                         std::int64_t j);
std::int64_t score_elements(const Case& c, const ScoreTensor& tensor);

/// Whether hidden rows or a block mask hide key j from query i.
bool hidden_by_rows(const Case& c, const Shape& shape, const Inputs& in, std::int64_t b, std::int64_t h, std::int64_t i,
                    std::int64_t j);
bool hidden_by_blocks(const Case& c, const Inputs& in, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j);

/// Whether a bit mask hides key j from query i.
bool hidden_by_bits(const Case& c, const Shape& shape, const Inputs& in, std::int64_t b, std::int64_t i, std::int64_t j);

/// How often the list of query i names key j; once where there are no lists.
std::int64_t times_listed(const Case& c, const Shape& shape, const Inputs& in, std::int64_t b, std::int64_t h,
                          std::int64_t i, std::int64_t j);

/// Random lists of keys: with keys twice, with entries that are no keys, and with some of those behind a count.
void draw_lists(const Case& c, const Shape& shape, std::uint64_t seed, Inputs& in);

/// Random bits of a bit mask: queries that see none of them, sequences without a mask, and others whose bytes end early.
void draw_bits(const Case& c, const Shape& shape, std::uint64_t seed, Inputs& in);

/// Random hidden rows and blocks of the case.
void draw_masks(const Case& c, const Shape& shape, std::uint64_t seed, Inputs& in);

/// Strides of hidden rows and of a block mask without gaps, for the axes that they have (stride not 0).
void make_masks_dense(Problem& p);

/// Index into key_mass: [batch, heads_q, seq_kv] or packed [heads_q, rows_kv].
std::int64_t mass_index(const Case& c, const Shape& shape, std::int64_t b, std::int64_t h, std::int64_t j);
std::int64_t mass_elements(const Case& c, const Shape& shape);

/// Index into lse.
std::int64_t lse_index(const Case& c, const Shape& shape, std::int64_t b, std::int64_t h, std::int64_t i);

}  // namespace flash_attention::testing
