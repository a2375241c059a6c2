#include "support/json.h"

#include <charconv>
#include <cmath>
#include <cstdio>

namespace flash_attention::support {
namespace {

std::string quote(std::string_view value) {
  std::string text = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (c == '\n') {
      text += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      text += escape;
    } else {
      text += c;
    }
  }
  return text + '"';
}

}  // namespace

Json::Json(double value) {
  if (!std::isfinite(value)) {
    text_ = "null";
    return;
  }
  char digits[32];
  const auto [end, error] = std::to_chars(digits, digits + sizeof digits, value);
  text_.assign(digits, end);
}

Json::Json(std::string_view value) : text_(quote(value)) {}

Json& Json::add(std::string_view name, Json value) {
  members_.emplace_back(quote(name), std::move(value));
  return *this;
}

Json& Json::push(Json value) {
  members_.emplace_back("", std::move(value));
  return *this;
}

std::string Json::text(int indent) const {
  if (kind_ == Kind::scalar) return text_;
  const bool is_object = kind_ == Kind::object;
  if (members_.empty()) return is_object ? "{}" : "[]";
  std::string result = is_object ? "{" : "[";
  const std::string line = "\n" + std::string(static_cast<std::size_t>(indent) + 2, ' ');
  for (std::size_t i = 0; i < members_.size(); ++i) {
    result += (i ? "," : "") + line;
    if (is_object) result += members_[i].first + ": ";
    result += members_[i].second.text(indent + 2);
  }
  return result + "\n" + std::string(static_cast<std::size_t>(indent), ' ') + (is_object ? "}" : "]");
}

}  // namespace flash_attention::support
