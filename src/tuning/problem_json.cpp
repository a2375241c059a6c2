#include "tuning/problem_json.h"

#include <cmath>
#include <concepts>
#include <functional>
#include <limits>
#include <map>
#include <type_traits>

#include "api/option_table.h"
#include "flash_attention/error.h"

namespace flash_attention::tuning {
namespace {

using support::Json;
using support::JsonValue;
using Kind = JsonValue::Kind;

// The words of each enum, in order.
template <class Enum>
constexpr int count_of = 0;
template <>
constexpr int count_of<Dtype> = 6;
template <>
constexpr int count_of<ScaleKind> = 4;
template <>
constexpr int count_of<Alignment> = 2;
template <>
constexpr int count_of<Precision> = 4;
template <>
constexpr int count_of<KeyListKind> = 3;
template <>
constexpr int count_of<BitMaskKind> = 3;

// Writing -------------------------------------------------------------------------------------------------------------

template <class T>
Json write(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return to_string(value);
  } else if constexpr (std::is_same_v<T, float>) {
    return static_cast<double>(value);
  } else {
    return value;
  }
}
template <class T>
Json write(const std::optional<T>& value) {
  return value ? write(*value) : Json(std::numeric_limits<double>::quiet_NaN());  // null
}
Json write(const Strides& s) { return Json::array().push(s.batch).push(s.seq).push(s.head); }
Json write(const ScoreTensor& t) {
  return Json::object()
      .add("dtype", to_string(t.dtype))
      .add("batch_stride", t.batch_stride)
      .add("head_stride", t.head_stride)
      .add("q_stride", t.q_stride);
}
Json write(const HiddenRows& h) {
  return Json::object().add("bounds", h.bounds).add("batch_stride", h.batch_stride).add("head_stride", h.head_stride);
}
Json write(const KeyList& l) {
  return Json::object()
      .add("kind", to_string(l.kind))
      .add("entries", l.entries)
      .add("heads", l.heads)
      .add("block_q", l.block_q)
      .add("block_kv", l.block_kv)
      .add("counts", l.counts);
}
Json write(const BitMask& m) {
  return Json::object().add("kind", to_string(m.kind)).add("row_bytes", m.row_bytes).add("offsets", m.offsets);
}
Json write(const BlockMask& m) {
  return Json::object()
      .add("block_q", m.block_q)
      .add("block_kv", m.block_kv)
      .add("batch_stride", m.batch_stride)
      .add("head_stride", m.head_stride)
      .add("q_stride", m.q_stride);
}
Json write(const decltype(Problem::program_sizes)& sizes) {
  Json all = Json::array();
  for (const auto& tensor : sizes) {
    Json one = Json::array();
    for (const std::int64_t size : tensor) one.push(size);
    all.push(std::move(one));
  }
  return all;
}

// Reading -------------------------------------------------------------------------------------------------------------

struct Member {
  const JsonValue& value;
  const std::string& name;

  void require(Kind kind, const char* what) const {
    if (value.kind() != kind) refuse(name, std::string("expected ") + what);
  }
  Member member(const std::string& member) const { return {value[member], name}; }
};

template <class T>
void read(const Member& at, T& to) {
  if constexpr (std::is_same_v<T, bool>) {
    at.require(Kind::flag, "true or false");
    to = at.value.flag();
  } else if constexpr (std::is_enum_v<T>) {
    at.require(Kind::text, "a name");
    std::string allowed;
    for (int i = 0; i < count_of<T>; ++i) {
      const auto name = to_string(static_cast<T>(i));
      if (name == at.value.text()) {
        to = static_cast<T>(i);
        return;
      }
      allowed += (i == 0 ? "" : ", ") + std::string(name);
    }
    refuse(at.name, "got '" + at.value.text() + "', allowed: " + allowed);
  } else if constexpr (std::integral<T>) {
    at.require(Kind::number, "a whole number");
    const double number = at.value.number();
    constexpr double least = static_cast<double>(std::numeric_limits<T>::min());
    constexpr double end =
        std::is_same_v<T, std::int64_t> ? 0x1p63 : static_cast<double>(std::numeric_limits<T>::max()) + 1;
    if (std::trunc(number) != number || number < least || number >= end) refuse(at.name, "expected a whole number");
    to = static_cast<T>(number);
  } else {
    at.require(Kind::number, "a number");
    to = static_cast<T>(at.value.number());
  }
}
void read(const Member& at, std::string& to) {
  at.require(Kind::text, "text");
  to = at.value.text();
}
template <class T>
void read(const Member& at, std::optional<T>& to) {
  if (at.value.kind() == Kind::null) {
    to.reset();
  } else {
    read(at, to.emplace());
  }
}
void read(const Member& at, Strides& to) {
  if (at.value.kind() != Kind::array || at.value.items().size() != 3) refuse(at.name, "expected three strides");
  std::size_t i = 0;
  for (std::int64_t* stride : {&to.batch, &to.seq, &to.head}) read({at.value.items()[i++], at.name}, *stride);
}
void read(const Member& at, ScoreTensor& to) {
  at.require(Kind::object, "dtype and strides");
  to.present = true;
  read(at.member("dtype"), to.dtype);
  read(at.member("batch_stride"), to.batch_stride);
  read(at.member("head_stride"), to.head_stride);
  read(at.member("q_stride"), to.q_stride);
}
void read(const Member& at, HiddenRows& to) {
  at.require(Kind::object, "bounds and strides");
  read(at.member("bounds"), to.bounds);
  read(at.member("batch_stride"), to.batch_stride);
  read(at.member("head_stride"), to.head_stride);
}
void read(const Member& at, KeyList& to) {
  at.require(Kind::object, "a kind and sizes");
  read(at.member("kind"), to.kind);
  read(at.member("entries"), to.entries);
  read(at.member("heads"), to.heads);
  read(at.member("block_q"), to.block_q);
  read(at.member("block_kv"), to.block_kv);
  read(at.member("counts"), to.counts);
}
void read(const Member& at, BitMask& to) {
  at.require(Kind::object, "a kind and sizes");
  read(at.member("kind"), to.kind);
  read(at.member("row_bytes"), to.row_bytes);
  read(at.member("offsets"), to.offsets);
}
void read(const Member& at, BlockMask& to) {
  at.require(Kind::object, "blocks and strides");
  read(at.member("block_q"), to.block_q);
  read(at.member("block_kv"), to.block_kv);
  read(at.member("batch_stride"), to.batch_stride);
  read(at.member("head_stride"), to.head_stride);
  read(at.member("q_stride"), to.q_stride);
}
void read(const Member& at, decltype(Problem::program_sizes)& to) {
  if (at.value.kind() != Kind::array || at.value.items().size() != to.size())
    refuse(at.name, "expected sizes of 8 tensors");
  for (std::size_t t = 0; t < to.size(); ++t) {
    const JsonValue& sizes = at.value.items()[t];
    if (sizes.items().size() != to[t].size()) refuse(at.name, "expected four sizes of each tensor");
    for (std::size_t i = 0; i < to[t].size(); ++i) read({sizes.items()[i], at.name}, to[t][i]);
  }
}

}  // namespace

// The fields of both lists, through the rows of the table. Fields that only callers have are not fields of Problem.
#define FLASH_ATTENTION_FIELDS(X)          \
  FLASH_ATTENTION_CALL_OPTIONS(X##_OPTION) \
  FLASH_ATTENTION_OTHER_FIELDS(X##_FIELD)

#define FLASH_ATTENTION_WRITE_same(field) \
  if (!(problem.field == usual.field)) json.add(#field, write(problem.field));
#define FLASH_ATTENTION_WRITE_parts(field) FLASH_ATTENTION_WRITE_same(field)
#define FLASH_ATTENTION_WRITE_call(field)
#define FLASH_ATTENTION_WRITE_OPTION(kind, field, default_value, argument, expected, form, scores) \
  FLASH_ATTENTION_WRITE_##form(field)
#define FLASH_ATTENTION_WRITE_FIELD(field, form, scores) FLASH_ATTENTION_WRITE_##form(field)

Json to_json(const Problem& problem) {
  static const Problem usual{.invariant = false};  // independent of the reader's environment
  Json json = Json::object();
  FLASH_ATTENTION_FIELDS(FLASH_ATTENTION_WRITE)
  return json;
}

#define FLASH_ATTENTION_READ_same(field) {#field, [](const Member& at, Problem& problem) { read(at, problem.field); }},
#define FLASH_ATTENTION_READ_parts(field) FLASH_ATTENTION_READ_same(field)
#define FLASH_ATTENTION_READ_call(field)
#define FLASH_ATTENTION_READ_OPTION(kind, field, default_value, argument, expected, form, scores) \
  FLASH_ATTENTION_READ_##form(field)
#define FLASH_ATTENTION_READ_FIELD(field, form, scores) FLASH_ATTENTION_READ_##form(field)

Problem problem_of(const JsonValue& json, const std::string& name) {
  using Reader = void (*)(const Member&, Problem&);
  static const auto& readers =
      *new std::map<std::string, Reader, std::less<>>{FLASH_ATTENTION_FIELDS(FLASH_ATTENTION_READ)};
  if (json.kind() != Kind::object) refuse(name, "expected a problem: an object with sizes and options");
  Problem problem{.invariant = false};
  for (const auto& [field, value] : json.members()) {
    const auto reader = readers.find(field);
    const std::string place = name + "." + field;
    if (reader == readers.end()) refuse(place, "a problem has no such field");
    reader->second({value, place}, problem);
  }
  return problem;
}

void refuse(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::invalid_argument, name + ": " + what);
}

Pass pass_of(const std::string& text, const std::string& name) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (text == to_string(pass)) return pass;
  }
  refuse(name, "got '" + text + "', allowed: forward, backward");
}

}  // namespace flash_attention::tuning
