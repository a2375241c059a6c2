#pragma once

#include <cstdint>
#include <vector>

#include "check/call.h"

namespace flash_attention::check {

constexpr std::int64_t rows_at_once = 512;  // rows that are read together

/// The relative error of a product of two elements: tf32 rounds both to 11 bits.
inline double product_error(const Problem& problem) { return problem.precision == Precision::tf32 ? 0x1p-10 : 0; }

/// One score before the softmax.
struct Score {
  std::int64_t i = 0, j = 0;  // in the sequence
  double value = 0;
  double derivative = 1;  // its derivative by scale * q.k, which softcap and a program change
  double slope = 1;       // its derivative by the score before the program
  double error = 0;       // how far a kernel's score may be from this one
  double derivative_error = 0;
  double slope_error = 0;
};

/// docs/numerics.md, "Scores, mask, softmax", for one head.
class Scores {
 public:
  Scores(const Call& call, std::int64_t b, std::int64_t head);

  const Sequence& sequence() const { return sequence_; }

  /// The scores that query i sees, in the order of the keys.
  std::vector<Score> of_query(std::int64_t i) const;
  /// The same for key j and queries [begin, end), in the order of the queries.
  std::vector<Score> of_key(std::int64_t j, std::int64_t begin, std::int64_t end) const;
  std::vector<Score> of_key(std::int64_t j) const { return of_key(j, 0, sequence_.len_q); }

 private:
  bool sees(std::int64_t i, std::int64_t j) const { return visible(p_, sequence_, i, j); }
  Score score(std::int64_t i, std::int64_t j, const double* q, const double* k, double bias) const;
  /// Appends the score unless a program hides it.
  void add(std::vector<Score>& scores, Score score) const;

  const Call& call_;
  const Problem& p_;
  std::int64_t b_, head_;
  Sequence sequence_;
  double slope_;
  double q_scale_;
};

}  // namespace flash_attention::check
