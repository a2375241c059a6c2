#pragma once

#include <cstdint>
#include <string>

namespace flash_attention::cli {

/// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

std::string format_bytes(double bytes);             ///< "1.5 MiB"
std::string format_growth(double bytes);            ///< the same, or "< 1 MiB": what a process's growth can tell
std::string format_seconds(double seconds);         ///< "12.3 us"
std::string format_flops(double flops_per_second);  ///< "123 GFLOP/s"; TFLOP/s from 1000 GFLOP/s on

}  // namespace flash_attention::cli
