#pragma once

#include <cmath>
#include <cstdint>

#include "check/call.h"
#include "check/scores.h"

namespace flash_attention::check {

constexpr double float_unit = 0x1p-23;
constexpr double slack = 3;  // between what errors are in sum and what they may be: no right kernel comes near

/// Distance of neighbouring numbers near 1.
double unit_of(Dtype dtype);

/// Distance of neighbouring numbers near 0. Products of bfloat16 on a CPU take what is below its normal numbers as 0.
double smallest_of(Dtype dtype);

/// What is lost of a probability, at most 1, that becomes a float16 below its normal numbers.
double underflow_of(Dtype dtype);

/// Of a sum of so many terms in float, relative to their sizes.
double sum_error(double terms);

/// How far the sum of a kernel may be from `value`, given the errors that its terms have together.
inline double allowed_of(double value, double errors, Dtype dtype) {
  return slack * (errors + unit_of(dtype) * std::fabs(value)) + smallest_of(dtype);
}

/// Of a score relative to a log-sum-exp.
double probability(const Score& s, double lse);

/// What a query's gradient needs in addition to its scores.
struct Upstream {
  double lse = 0;
  double delta = 0, delta_size = 0;  // dout . out - dlse
};
Upstream upstream(const Call& call, const double* out, const double* dout, double lse, double dlse);

/// A derivative and its error.
struct Derivative {
  double value = 0, error = 0;
};

/// By the score as the softmax sees it; the error is that of the sums behind it alone, not of the score.
Derivative by_score(const Call& call, double p, double kept, const Upstream& up, const double* dout, const double* v);

/// By scale * q.k, with all errors.
Derivative by_product(const Call& call, const Score& s, double p, double kept, const Upstream& up, const double* dout,
                      const double* v);

}  // namespace flash_attention::check
