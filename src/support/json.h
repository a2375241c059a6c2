#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flash_attention::support {

/// A JSON value to write: made once, printed once. Members keep the order in which they were added.
class Json {
 public:
  static Json object() { return Json(Kind::object); }
  static Json array() { return Json(Kind::array); }

  Json(bool value) : text_(value ? "true" : "false") {}
  Json(std::integral auto value) : text_(std::to_string(value)) {}
  Json(double value);  ///< null if it is not finite, since JSON has no infinity
  Json(std::string_view value);
  Json(const std::string& value) : Json(std::string_view(value)) {}
  Json(const char* value) : Json(std::string_view(value)) {}

  Json& add(std::string_view name, Json value);  ///< to an object
  Json& push(Json value);                        ///< to an array
  std::size_t size() const { return members_.size(); }

  std::string text(int indent = 0) const;

 private:
  enum class Kind { scalar, object, array };
  explicit Json(Kind kind) : kind_(kind) {}

  Kind kind_ = Kind::scalar;
  std::string text_;
  std::vector<std::pair<std::string, Json>> members_;
};

}  // namespace flash_attention::support
