#pragma once

#include <cstdint>
#include <vector>

#include "check/call.h"

namespace flash_attention::check {

/// A row of results in fp64, and how far a kernel with the call's types may be from it.
struct Row {
  explicit Row(std::int64_t width) : values(static_cast<std::size_t>(width)), allowed(values.size()) {}
  std::vector<double> values, allowed;
};

/// The output of query i of sequence b and its log-sum-exp (one number).
struct QueryResults {
  Row out, lse;
};
QueryResults query_results(const Call& call, std::int64_t b, std::int64_t head, std::int64_t i);

/// The gradient of query i, from the call's out, lse and dout.
Row query_gradient(const Call& call, std::int64_t b, std::int64_t head, std::int64_t i);

/// The gradients of key j and its value, over all queries and heads that see it.
struct KeyGradients {
  Row dk, dv;
};
KeyGradients key_gradients(const Call& call, std::int64_t b, std::int64_t kv_head, std::int64_t j);

}  // namespace flash_attention::check
