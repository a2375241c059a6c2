#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace flash_attention::cli {

/// A JSON value that was read. What is not there, or is of another kind, reads as empty: "", 0, false, no members.
class JsonValue {
 public:
  /// Throws Error(invalid_argument) with the place of the mistake; `name` says what was read.
  static JsonValue parse(std::string_view text, const std::string& name);

  const JsonValue& operator[](const std::string& member) const;
  const std::vector<JsonValue>& items() const { return items_; }
  const std::map<std::string, JsonValue>& members() const { return members_; }
  const std::string& text() const { return text_; }
  double number() const { return number_; }
  bool flag() const { return flag_; }

 private:
  friend class JsonParser;
  std::string text_;
  double number_ = 0;
  bool flag_ = false;
  std::vector<JsonValue> items_;
  std::map<std::string, JsonValue> members_;
};

}  // namespace flash_attention::cli
