#pragma once

#include "fuzz/generator/problems.h"

namespace flash_attention::fuzz {

/// Another problem with the same options. Run-time parameters (batch, lengths, strides, inputs, ...) are drawn again from
/// the domain, so most variants can use the kernels compiled for the first; the caller checks whether one can. `variant`
/// counts from 1; the same arguments give the same problem. From `values_alone` on, only the values differ.
constexpr int values_alone = 1000;
GeneratedProblem vary(const GeneratedProblem& problem, const Domain& domain, int share, int variant,
                      const Sizes& sizes = {});

}  // namespace flash_attention::fuzz
