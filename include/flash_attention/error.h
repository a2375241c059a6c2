#pragma once

#include <stdexcept>
#include <string>

#include "flash_attention/export.h"

namespace flash_attention {

/// What went wrong, in a form a program can switch on. The values are part of the C ABI.
enum class ErrorCode : int {
  invalid_argument = 1,  ///< the caller's mistake: the message names the argument, its value and what is allowed
  unsupported = 2,       ///< a correct request that no kernel of this device can serve
  unavailable = 3,       ///< the device, driver or compiler is not here: the message says how to get it
  out_of_memory = 4,
  compile_failed = 5,  ///< carries the compiler's log and the path of the source
  device_failed = 6,   ///< a driver call or a kernel failed
  internal = 7,        ///< a bug of ours
};

/// The only exception this library throws.
class FLASH_ATTENTION_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace flash_attention
