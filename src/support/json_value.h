#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace flash_attention::support {

/// A parsed JSON value. A missing value, or one of another kind, reads as empty: "", 0, false, no members.
class JsonValue {
 public:
  enum class Kind : std::uint8_t { null, flag, number, text, array, object };

  /// Throws Error(invalid_argument) with the place of the mistake. `name` is the name of the text.
  static JsonValue parse(std::string_view text, const std::string& name);

  Kind kind() const { return kind_; }
  const JsonValue& operator[](const std::string& member) const;
  const std::vector<JsonValue>& items() const { return items_; }
  const std::map<std::string, JsonValue>& members() const { return members_; }
  const std::string& text() const { return text_; }
  double number() const { return number_; }
  bool flag() const { return flag_; }

 private:
  friend class JsonParser;
  Kind kind_ = Kind::null;
  std::string text_;
  double number_ = 0;
  bool flag_ = false;
  std::vector<JsonValue> items_;
  std::map<std::string, JsonValue> members_;
};

}  // namespace flash_attention::support
