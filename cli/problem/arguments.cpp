#include "cli/problem/arguments.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cli/output/format.h"
#include "flash_attention/error.h"

namespace flash_attention::cli {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::invalid_argument, message); }

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string suggestion(std::string_view word, const std::vector<std::string_view>& known) {
  std::string_view best;
  std::size_t best_distance = 3;
  for (std::string_view candidate : known) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best.empty() ? "" : " (did you mean " + std::string(best) + "?)";
}

Arguments::Arguments(const std::vector<Flag>& flags, std::size_t max_words, int count, const char* const* texts) {
  for (const Flag& flag : flags) {
    if (!flag.fallback.empty()) fallbacks_[std::string(flag.name)] = flag.fallback;
  }
  for (int i = 0; i < count; ++i) {
    const std::string_view text = texts[i];
    if (!text.starts_with("--")) {
      if (words_.size() == max_words) refuse(format("unexpected word '%s'; flags start with --", texts[i]));
      words_.emplace_back(text);
      continue;
    }
    const std::size_t equals = text.find('=');
    const std::string name(text.substr(2, equals == text.npos ? text.npos : equals - 2));
    const auto flag = std::find_if(flags.begin(), flags.end(), [&](const Flag& f) { return f.name == name; });
    if (flag == flags.end()) {
      std::vector<std::string> names;
      for (const Flag& f : flags) names.push_back("--" + std::string(f.name));
      refuse("unknown flag --" + name + suggestion("--" + name, {names.begin(), names.end()}) + "; --help lists the flags");
    }
    if (given_.contains(name)) refuse("--" + name + " is given twice");
    if (flag->value.empty()) {
      if (equals != text.npos) refuse("--" + name + " is a switch and takes no value");
      given_[name] = "";
    } else if (equals != text.npos) {
      given_[name] = text.substr(equals + 1);
    } else if (i + 1 < count) {
      given_[name] = texts[++i];
    } else {
      refuse("--" + name + " needs a value: " + std::string(flag->help));
    }
  }
}

std::string Arguments::text(std::string_view name) const {
  const std::string key(name);
  if (const auto found = given_.find(key); found != given_.end()) return found->second;
  if (const auto found = fallbacks_.find(key); found != fallbacks_.end()) return found->second;
  return "";
}

std::int64_t Arguments::integer(std::string_view name, std::int64_t low, std::int64_t high) const {
  const std::string value = text(name);
  std::int64_t result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size() || result < low || result > high) {
    refuse(format("--%.*s: got '%s', allowed is a whole number from %lld to %lld", static_cast<int>(name.size()),
                  name.data(), value.c_str(), static_cast<long long>(low), static_cast<long long>(high)));
  }
  return result;
}

double Arguments::number(std::string_view name, double least) const {
  const std::string value = text(name);
  double result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size() || !std::isfinite(result) || result < least) {
    const std::string bound = least == std::numeric_limits<double>::lowest() ? "" : format(" of at least %g", least);
    refuse("--" + std::string(name) + ": got '" + value + "', allowed is a finite number" + bound);
  }
  return result;
}

std::string Arguments::choice(std::string_view name, const std::vector<std::string_view>& allowed) const {
  std::string value = text(name);
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return value;
  std::string list;
  for (std::string_view word : allowed) list += (list.empty() ? "" : ", ") + std::string(word);
  refuse("--" + std::string(name) + ": got '" + value + "', allowed: " + list);
}

std::string describe(const std::vector<Flag>& flags) {
  std::size_t width = 0;
  for (const Flag& flag : flags) width = std::max(width, flag.name.size() + flag.value.size() + 3);
  std::string text;
  for (const Flag& flag : flags) {
    std::string left = "--" + std::string(flag.name) + (flag.value.empty() ? "" : " " + std::string(flag.value));
    left.resize(std::max(left.size(), width), ' ');
    text += "  " + left + "  " + std::string(flag.help);
    if (!flag.fallback.empty()) text += " [" + std::string(flag.fallback) + "]";
    text += "\n";
  }
  return text;
}

}  // namespace flash_attention::cli
