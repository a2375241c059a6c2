#pragma once

#include <cstdint>

#include "flash_attention/problem.h"

namespace flash_attention::api {

void check_size(const char* argument, std::int64_t got, std::int64_t smallest);

/// Checks that the bytes that all axes span together can be counted in 64 bits.
void check_reach(const char* argument, std::int64_t stride, std::int64_t size);

/// A tensor's axes before the heads.
struct RowAxes {
  bool packed;
  std::int64_t batch;  // or pages
  std::int64_t seq;
};

/// Dense strides if the caller gave none. Refuses a tensor whose offsets would leave 64 bits.
Strides resolve(const char* argument, const Strides& given, const RowAxes& rows, std::int64_t heads, std::int64_t dim);

}  // namespace flash_attention::api
