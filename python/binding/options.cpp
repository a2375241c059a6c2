#include <type_traits>

#include "call/call.h"
#include "errors.h"

namespace flash_attention::python {
namespace {

/// NumPy's bool is not Python's bool.
bool is_bool_of_numpy(nb::handle given) {
  const auto word = [&](const char* name) { return nb::cast<std::string>(given.type().attr(name)); };
  return word("__module__") == "numpy" && (word("__name__") == "bool" || word("__name__") == "bool_");
}

/// The value of an argument that is not a tensor.
template <typename T>
T value_of(nb::handle given, const char* name, const char* expected) {
  T value{};
  if (nb::try_cast<T>(given, value)) return value;
  if constexpr (std::is_same_v<T, bool>) {
    if (is_bool_of_numpy(given)) return PyObject_IsTrue(given.ptr()) == 1;
  }
  if (std::is_same_v<T, std::int64_t> && PyLong_Check(given.ptr())) {
    const std::string number = nb::cast<std::string>(nb::str(given));
    refuse_value(name, "got " + number + "; allowed are ints of 64 bits");
  }
  const std::string type = nb::cast<std::string>(given.type().attr("__name__"));
  refuse_type(name, std::string("expected ") + expected + ", got " + type);
}

template <typename T>
void read_option(nb::handle given, const char* name, const char* expected, T& out) {
  out = value_of<T>(given, name, expected);
}

template <typename T>
void read_option(nb::handle given, const char* name, const char* expected, std::optional<T>& out) {
  if (!given.is_none()) out = value_of<T>(given, name, expected);
}

template <typename T>
nb::object object_of(const T& value) {
  return nb::cast(value);
}

template <typename T>
nb::object object_of(const std::optional<T>& value) {
  return value ? nb::cast(*value) : nb::none();
}

}  // namespace

CallOptions options_of(const nb::tuple& given) {
  CallOptions options;
  const std::size_t size = given.size();
  std::size_t at = 0;
#define FLASH_ATTENTION_READ(kind, name, default_value, argument, expected, ...) \
  if (at < size) read_option(given[at++], argument, expected, options.name);
  FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_READ)
#undef FLASH_ATTENTION_READ
  return options;
}

nb::tuple tuple_of(const CallOptions& options) {
  nb::list values;
#define FLASH_ATTENTION_APPEND(kind, name, ...) values.append(object_of(options.name));
  FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_APPEND)
#undef FLASH_ATTENTION_APPEND
  return nb::tuple(values);
}

void add_options(nb::module_& module) {
  nb::list fields;
#define FLASH_ATTENTION_FIELD(kind, name, ...) fields.append(nb::make_tuple(#name, #kind, object_of(CallOptions{}.name)));
  FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_FIELD)
#undef FLASH_ATTENTION_FIELD
  module.attr("options") = nb::tuple(fields);
  nb::list names;
  for (const char* name : slot_names) names.append(name);
  module.attr("tensors") = nb::tuple(names);
}

}  // namespace flash_attention::python
