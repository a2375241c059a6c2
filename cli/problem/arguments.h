#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace flash_attention::cli {

/// One `--name VALUE`, or a switch `--name` where `value` is empty.
struct Flag {
  std::string_view name;   ///< without the dashes
  std::string_view value;  ///< what stands for the value in the help, e.g. "N"; empty for a switch
  std::string_view help;
  std::string_view fallback = {};  ///< value where the flag is not given; empty = none
};

/// What was typed after the verb. Every accessor throws Error(invalid_argument) that names the flag, what was got and
/// what is allowed.
class Arguments {
 public:
  /// Takes `--name value`, `--name=value` and words without dashes, of which there may be at most `max_words`.
  Arguments(const std::vector<Flag>& flags, std::size_t max_words, int count, const char* const* texts);

  bool given(std::string_view name) const { return given_.contains(std::string(name)); }
  bool on(std::string_view name) const { return given(name); }
  std::string text(std::string_view name) const;
  std::int64_t integer(std::string_view name, std::int64_t low, std::int64_t high = std::int64_t{1} << 40) const;
  double number(std::string_view name, double least = std::numeric_limits<double>::lowest()) const;
  std::string choice(std::string_view name, const std::vector<std::string_view>& allowed) const;

  const std::vector<std::string>& words() const { return words_; }

 private:
  std::map<std::string, std::string> given_;      // by the user
  std::map<std::string, std::string> fallbacks_;  // of every flag that has one
  std::vector<std::string> words_;
};

/// The flags, one a line, aligned.
std::string describe(const std::vector<Flag>& flags);

/// The known word that looks most like the given one, as " (did you mean X?)"; empty if none is near.
std::string suggestion(std::string_view word, const std::vector<std::string_view>& known);

}  // namespace flash_attention::cli
