#pragma once

#include <cmath>
#include <cstdint>

#include "check/call.h"
#include "check/scores.h"

namespace flash_attention::check {

constexpr double float_unit = 0x1p-23;
// between the sum of the estimated errors and the allowed error: correct kernels stay far below it
constexpr double slack = 3;

/// Distance of neighbouring numbers near 1.
double unit_of(Dtype dtype);

/// Distance of neighbouring numbers near 0. Products of bfloat16 on a CPU treat numbers below its normal ones as 0.
double smallest_of(Dtype dtype);

/// The error of a probability, at most 1, that becomes a float16 below its normal numbers.
double underflow_of(Dtype dtype);

/// The relative error of a sum of this many terms in float.
double sum_error(double terms);

/// How far a kernel's sum may be from `value`, if its terms together have these errors.
inline double allowed_of(double value, double errors, Dtype dtype) {
  return slack * (errors + unit_of(dtype) * std::fabs(value)) + smallest_of(dtype);
}

/// The probability of a score, given a log-sum-exp.
double probability(const Score& s, double lse);

/// The data for a query's gradient, besides its scores.
struct Upstream {
  double lse = 0;
  double delta = 0, delta_size = 0;  // dout . out - dlse
};
Upstream upstream(const Call& call, const double* out, const double* dout, double lse, double dlse);

/// A derivative and its error.
struct Derivative {
  double value = 0, error = 0;
};

/// By the score that enters the softmax. The error is only that of the sums after it, not of the score itself.
Derivative by_score(const Call& call, double p, double kept, const Upstream& up, const double* dout, const double* v);

/// By scale * q.k, with all errors.
Derivative by_product(const Call& call, const Score& s, double p, double kept, const Upstream& up, const double* dout,
                      const double* v);

}  // namespace flash_attention::check
