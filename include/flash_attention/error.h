#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "flash_attention/export.h"
#include "flash_attention/standard.h"

namespace flash_attention {

/// The kind of an error, on which a program can switch. The values are part of the C ABI.
enum class ErrorCode : int {
  invalid_argument = 1,  ///< the caller's mistake: the message names the argument, its value and what is allowed
  unsupported = 2,       ///< a correct request that no kernel of this device can serve
  unavailable = 3,       ///< the device, driver or compiler is missing: the message says how to get it
  out_of_memory = 4,
  compile_failed = 5,  ///< the message has the compiler's log and the path of the source
  device_failed = 6,   ///< a driver call or a kernel failed
  internal = 7,        ///< a bug of this library
};

/// The only exception this library throws.
class FLASH_ATTENTION_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  /// A refusal of an argument; what() is "ARGUMENT: SENTENCE". In the sentence, names of other arguments are in braces,
  /// {page_table}; what() omits the braces. A caller with other names for the arguments can replace them.
  Error(ErrorCode code, const std::string& argument, const std::string& sentence)
      : std::runtime_error(argument + ": " + without_braces(sentence)),
        code_(code),
        refusal_(std::make_shared<const Refusal>(argument, sentence)) {}
  ErrorCode code() const noexcept { return code_; }
  std::string_view argument() const noexcept { return refusal_ ? refusal_->argument : std::string_view(); }
  std::string_view sentence() const noexcept { return refusal_ ? refusal_->sentence : std::string_view(what()); }

 private:
  struct Refusal {
    Refusal(std::string of, std::string says) : argument(std::move(of)), sentence(std::move(says)) {}
    std::string argument, sentence;
  };

  static std::string without_braces(const std::string& sentence) {
    std::string text;
    for (const char c : sentence) {
      if (c != '{' && c != '}') text += c;
    }
    return text;
  }

  ErrorCode code_;
  std::shared_ptr<const Refusal> refusal_;  // shared: a copy of an exception must not throw
};

}  // namespace flash_attention
