#pragma once

#include "fuzz/generator/problems.h"

namespace flash_attention::fuzz {

/// Another problem with the options of this one: what is known when a kernel runs (batch, lengths, strides, inputs, ...) is
/// drawn anew from the domain, so most variants can use what was compiled for the first; the caller looks whether one can.
/// `variant` counts from 1; the same for the same arguments. From `values_alone` on, nothing but the values differs.
constexpr int values_alone = 1000;
GeneratedProblem vary(const GeneratedProblem& problem, const Domain& domain, int share, int variant,
                      const Sizes& sizes = {});

}  // namespace flash_attention::fuzz
