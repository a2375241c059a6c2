#include "support/json_value.h"

#include <charconv>

#include "flash_attention/error.h"

namespace flash_attention::support {

class JsonParser {
 public:
  JsonParser(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  JsonValue document() {
    JsonValue result = value();
    if (peek() != '\0') fail();
    return result;
  }

 private:
  [[noreturn]] void fail() const {
    throw Error(ErrorCode::invalid_argument, name_ + ": not JSON at character " + std::to_string(at_));
  }

  char peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  JsonValue value() {
    using Kind = JsonValue::Kind;
    constexpr int deepest = 64;  // so that a damaged file cannot use up the stack
    JsonValue result;
    if (++depth_ > deepest) fail();
    if (take('{')) {
      result.kind_ = Kind::object;
      while (!take('}')) {
        if (!result.members_.empty() && !take(',')) fail();
        std::string name = string();
        if (!take(':')) fail();
        result.members_[std::move(name)] = value();
      }
    } else if (take('[')) {
      result.kind_ = Kind::array;
      while (!take(']')) {
        if (!result.items_.empty() && !take(',')) fail();
        result.items_.push_back(value());
      }
    } else if (peek() == '"') {
      result.kind_ = Kind::text;
      result.text_ = string();
    } else if (take("true")) {
      result.kind_ = Kind::flag;
      result.flag_ = true;
    } else if (take("false")) {
      result.kind_ = Kind::flag;
    } else if (!take("null")) {
      result.kind_ = Kind::number;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), result.number_);
      if (error != std::errc()) fail();
      at_ = static_cast<std::size_t>(end - text_.data());
    }
    --depth_;
    return result;
  }

  /// Escapes other than \n, \t and \u keep their character. The files that we write have no others that matter.
  std::string string() {
    if (!take('"')) fail();
    std::string result;
    while (at_ < text_.size() && text_[at_] != '"') {
      const bool escaped = text_[at_] == '\\' && at_ + 1 < text_.size();
      if (escaped) ++at_;
      const char c = text_[at_++];
      result += escaped && c == 'n' ? '\n' : escaped && c == 't' ? '\t' : c;
    }
    if (at_ == text_.size()) fail();
    ++at_;
    return result;
  }

  std::string_view text_;
  const std::string& name_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

JsonValue JsonValue::parse(std::string_view text, const std::string& name) { return JsonParser(text, name).document(); }

const JsonValue& JsonValue::operator[](const std::string& member) const {
  static const JsonValue nothing;
  const auto found = members_.find(member);
  return found == members_.end() ? nothing : found->second;
}

}  // namespace flash_attention::support
