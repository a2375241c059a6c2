#pragma once

// The interpreter of programs. Each instruction is a loop over the keys of a part of a tile, with a query in each lane.
// Nothing is compiled at run time; the values of 16 keys stay in L1.

#include "cpu/tile/math.h"
#include "cpu/tile/rows.h"
#include "launch/program_view.h"

namespace flash_attention::cpu {
namespace {

using program::Op;
using program::Type;

FLASH_ATTENTION_INLINE Int load_int(const float* from) { return load(reinterpret_cast<const std::int32_t*>(from)); }
FLASH_ATTENTION_INLINE void store_int(float* to, Int value) { store(to, (Vec)value); }
FLASH_ATTENTION_INLINE Int choose(Int where, Int yes, Int no) { return where ? yes : no; }

template <class Function>
FLASH_ATTENTION_INLINE Vec by_lane(Vec x, Function function) {
  for (int lane = 0; lane < vector_lanes; ++lane) x[lane] = function(x[lane]);
  return x;
}

FLASH_ATTENTION_INLINE Vec natural_exp(Vec x) { return exp2(x * log2_e); }

/// Rounds towards 0. A number out of range becomes the nearest int, NaN becomes 0.
FLASH_ATTENTION_INLINE Int to_integer(Vec x) {
  const Vec bounded = select(x < -0x1p31f, splat(-0x1p31f), select(x > 2147483520.0f, splat(2147483520.0f), x));
  const Int whole = __builtin_convertvector(select(x == x, bounded, Vec{}), Int);
  return choose(x >= 0x1p31f, Int{} + 0x7fffffff, whole);
}

/// Rounds down. Anything divided by 0 is 0.
FLASH_ATTENTION_INLINE std::int32_t floor_quotient(std::int32_t x, std::int32_t y) {
  if (y == 0) return 0;
  const std::int64_t quotient = std::int64_t{x} / y;
  return static_cast<std::int32_t>(quotient - (quotient * y != x && (x < 0) != (y < 0)));
}
FLASH_ATTENTION_INLINE std::int32_t floor_remainder(std::int32_t x, std::int32_t y) {
  return y == 0 ? 0 : static_cast<std::int32_t>(x - std::int64_t{floor_quotient(x, y)} * y);
}

/// Runs a code for the rows of one vector of lanes.
struct Interpreter {
  const ProgramView& program;
  const ProgramRows& rows;
  const int v;  // the vector of lanes
  float (*slots)[program_keys * vector_lanes];

  // The current part of the tile.
  const float* score = nullptr;  // of its first key
  int score_stride = 0;          // floats from key to key
  std::int32_t first_key = 0;
  int keys = 1;

  const float* at(const Instruction& step, int arg, int key) const {
    return slots[step.args[arg]] + ((step.varying >> arg) & 1) * key * vector_lanes;
  }
  float* to(const Instruction& step, int key) const { return slots[step.to] + key * vector_lanes; }

  template <class Function>
  FLASH_ATTENTION_INLINE void one(const Instruction& step, Function function) const {
    for (int key = 0; key < keys; ++key) store(to(step, key), function(load(at(step, 0, key))));
  }
  template <class Function>
  FLASH_ATTENTION_INLINE void two(const Instruction& step, Function function) const {
    for (int key = 0; key < keys; ++key) store(to(step, key), function(load(at(step, 0, key)), load(at(step, 1, key))));
  }
  template <class Function>
  FLASH_ATTENTION_INLINE void two_ints(const Instruction& step, Function function) const {
    for (int key = 0; key < keys; ++key)
      store_int(to(step, key), function(load_int(at(step, 0, key)), load_int(at(step, 1, key))));
  }
  /// For floats or ints.
  template <class Function>
  FLASH_ATTENTION_INLINE void compare(const Instruction& step, Function function) const {
    if (step.arg_type == Type::real) {
      for (int key = 0; key < keys; ++key)
        store_int(to(step, key), function(load(at(step, 0, key)), load(at(step, 1, key))));
    } else {
      two_ints(step, [&](Int x, Int y) { return function(x, y); });
    }
  }
  /// The same for floats and ints. Ints wrap around.
  template <class Reals, class Ints>
  FLASH_ATTENTION_INLINE void either(const Instruction& step, Reals reals, Ints ints) const {
    step.type == Type::real ? two(step, reals) : two_ints(step, ints);
  }
  /// Lane by lane; once if all lanes are equal.
  template <class Function>
  FLASH_ATTENTION_INLINE void divide(const Instruction& step, Function function) const {
    two_ints(step, [&](Int x, Int y) {
      if (step.uniform) return Int{} + function(x[0], y[0]);
      for (int lane = 0; lane < vector_lanes; ++lane) x[lane] = function(x[lane], y[lane]);
      return x;
    });
  }
  FLASH_ATTENTION_INLINE void fill(const Instruction& step, Vec value) const {
    for (int key = 0; key < keys; ++key) store(to(step, key), value);
  }

  /// The place of an element in a tensor. A negative index counts from the end; every index is clamped to the tensor.
  FLASH_ATTENTION_INLINE Int offset(const Instruction& step, const ProgramTensor& tensor, int key) const {
    Int place{};
    for (int axis = 0; axis < tensor.rank; ++axis) {
      const std::int32_t size = tensor.sizes[axis];
      Int index = load_int(at(step, axis, key));
      index = choose(index < 0, index + size, index);
      index = choose(index < 0, Int{}, choose(index > size - 1, Int{} + (size - 1), index));
      place = place * size + index;
    }
    return place;
  }

  template <class Get>
  FLASH_ATTENTION_INLINE void gather(const Instruction& step, const ProgramTensor& tensor, Get get) const {
    for (int key = 0; key < keys; ++key) {
      const Int place = offset(step, tensor, key);
      float* result = to(step, key);
      for (int lane = 0; lane < (step.uniform ? 1 : vector_lanes); ++lane) {
        const auto value = get(tensor.data, place[lane]);
        __builtin_memcpy(result + lane, &value, 4);
      }
      if (step.uniform) store(result, splat(result[0]));
    }
  }

  void load_elements(const Instruction& step) const {
    const ProgramTensor& tensor = program.tensors[step.index];
    bool empty = false;
    for (int axis = 0; axis < tensor.rank; ++axis) empty = empty || tensor.sizes[axis] == 0;
    if (empty) return fill(step, Vec{});
    switch (tensor.element) {
      case program::Element::float32:
        return gather(step, tensor, [](const void* data, int place) { return static_cast<const float*>(data)[place]; });
      case program::Element::float16:
        return gather(step, tensor, [](const void* data, int place) {
          return load_some<Float16>(static_cast<const Float16::Stored*>(data) + place, 1)[0];
        });
      case program::Element::bfloat16:
        return gather(step, tensor, [](const void* data, int place) {
          return load_some<Bfloat16>(static_cast<const Bfloat16::Stored*>(data) + place, 1)[0];
        });
      case program::Element::int32:
        return gather(step, tensor,
                      [](const void* data, int place) { return static_cast<const std::int32_t*>(data)[place]; });
      case program::Element::int64:
        return gather(step, tensor, [](const void* data, int place) {
          return static_cast<std::int32_t>(static_cast<const std::int64_t*>(data)[place]);
        });
      case program::Element::boolean:
        return gather(step, tensor, [](const void* data, int place) {
          return static_cast<const std::uint8_t*>(data)[place] != 0 ? -1 : 0;
        });
    }
  }

  void run(const Instruction& step) const;

  void run(const Instruction* steps, int count) const {
    for (int n = 0; n < count; ++n) run(steps[n]);
  }
};

inline void Interpreter::run(const Instruction& step) const {
  switch (step.op) {
    case Op::score:
      for (int key = 0; key < keys; ++key) store(to(step, key), load(score + key * score_stride));
      return;
    case Op::b:
      return fill(step, (Vec)(Int{} + static_cast<std::int32_t>(rows.batch)));
    case Op::h:
      return fill(step, (Vec)load(rows.heads + v * vector_lanes));
    case Op::i:
      return fill(step, (Vec)load(rows.queries + v * vector_lanes));
    case Op::j:
      for (int key = 0; key < keys; ++key) store_int(to(step, key), Int{} + (first_key + key));
      return;
    case Op::literal:
      return fill(step, step.type == Type::real ? splat(step.real) : (Vec)(Int{} + step.integer));
    case Op::scalar:
      return fill(step, splat(program.scalars[step.index]));
    case Op::load:
      return load_elements(step);
    case Op::offset:
      for (int key = 0; key < keys; ++key) store_int(to(step, key), offset(step, program.tensors[step.index], key));
      return;
    case Op::add:
      return either(
          step, [](Vec x, Vec y) { return x + y; }, [](Int x, Int y) { return (Int)((Uint)x + (Uint)y); });
    case Op::sub:
      return either(
          step, [](Vec x, Vec y) { return x - y; }, [](Int x, Int y) { return (Int)((Uint)x - (Uint)y); });
    case Op::mul:
      return either(
          step, [](Vec x, Vec y) { return x * y; }, [](Int x, Int y) { return (Int)((Uint)x * (Uint)y); });
    case Op::div:
      return two(step, [](Vec x, Vec y) { return x / y; });
    case Op::floordiv:
      return divide(step, floor_quotient);
    case Op::mod:
      return divide(step, floor_remainder);
    case Op::fmod:
      return two(step, [](Vec x, Vec y) {
        for (int lane = 0; lane < vector_lanes; ++lane) x[lane] = __builtin_fmodf(x[lane], y[lane]);
        return x;
      });
    case Op::neg:
      if (step.type == Type::real) return one(step, [](Vec x) { return -x; });
      return one(step, [](Vec x) { return (Vec)(Int)(0u - (Uint)x); });
    case Op::abs:
      if (step.type == Type::real) return one(step, [](Vec x) { return absolute(x); });
      return one(step, [](Vec x) { return (Vec)choose((Int)x < 0, (Int)(0u - (Uint)x), (Int)x); });
    case Op::min:  // of a number and NaN: NaN, as in torch
      return either(
          step, [](Vec x, Vec y) { return select((x < y) | (x != x), x, y); },
          [](Int x, Int y) { return choose(x < y, x, y); });
    case Op::max:
      return either(
          step, [](Vec x, Vec y) { return select((x > y) | (x != x), x, y); },
          [](Int x, Int y) { return choose(x > y, x, y); });
    case Op::exp:
      return one(step, [](Vec x) { return natural_exp(x); });
    case Op::log:
      return one(step, [](Vec x) { return by_lane(x, [](float y) { return __builtin_logf(y); }); });
    case Op::tanh:
      return one(step, [](Vec x) { return tanh(x); });
    case Op::sigmoid:
      return one(step, [](Vec x) { return 1.0f / (1.0f + natural_exp(-x)); });
    case Op::sqrt:
      return one(step, [](Vec x) { return by_lane(x, [](float y) { return __builtin_sqrtf(y); }); });
    case Op::sin:
      return one(step, [](Vec x) { return by_lane(x, [](float y) { return __builtin_sinf(y); }); });
    case Op::cos:
      return one(step, [](Vec x) { return by_lane(x, [](float y) { return __builtin_cosf(y); }); });
    case Op::floor:
      return one(step, [](Vec x) { return by_lane(x, [](float y) { return __builtin_floorf(y); }); });
    case Op::detach:
    case Op::slope:  // removed before
      return one(step, [](Vec x) { return x; });
    case Op::eq:
      return compare(step, [](auto x, auto y) { return x == y; });
    case Op::ne:
      return compare(step, [](auto x, auto y) { return x != y; });
    case Op::lt:
      return compare(step, [](auto x, auto y) { return x < y; });
    case Op::le:
      return compare(step, [](auto x, auto y) { return x <= y; });
    case Op::gt:
      return compare(step, [](auto x, auto y) { return x > y; });
    case Op::ge:
      return compare(step, [](auto x, auto y) { return x >= y; });
    case Op::logical_and:
      return two_ints(step, [](Int x, Int y) { return x & y; });
    case Op::logical_or:
      return two_ints(step, [](Int x, Int y) { return x | y; });
    case Op::logical_xor:
      return two_ints(step, [](Int x, Int y) { return x ^ y; });
    case Op::logical_not:
      return one(step, [](Vec x) { return (Vec) ~(Int)x; });
    case Op::where:
      for (int key = 0; key < keys; ++key) {
        const Int where = load_int(at(step, 0, key));
        store(to(step, key), select(where, load(at(step, 1, key)), load(at(step, 2, key))));
      }
      return;
    case Op::to_float:
      return one(step,
                 [&](Vec x) { return __builtin_convertvector(step.arg_type == Type::boolean ? (Int)x & 1 : (Int)x, Vec); });
    case Op::to_int:
      return one(step, [&](Vec x) { return step.arg_type == Type::boolean ? (Vec)((Int)x & 1) : (Vec)to_integer(x); });
  }
}

/// Calls use(v, first, keys, result) for the parts of a tile; result(n, key) is the address of a vector: result n of a
/// key. S [keys][lanes]: the score that the code reads.
template <class Use>
inline void run_code(const ProgramView& program, const Code& code, const ProgramRows& rows, std::int64_t begin, int count,
                     const float* S, Use use) {
  alignas(64) float slots[program_slots][program_keys * vector_lanes];
  for (int v = 0; v < rows.lanes / vector_lanes; ++v) {
    Interpreter interpreter{.program = program, .rows = rows, .v = v, .slots = slots};
    interpreter.run(code.instructions, code.num_fixed);
    for (int first = 0; first < count; first += program_keys) {
      interpreter.score = S + first * rows.lanes + v * vector_lanes;
      interpreter.score_stride = rows.lanes;
      interpreter.first_key = static_cast<std::int32_t>(begin + first);
      interpreter.keys = smaller(program_keys, count - first);
      interpreter.run(code.instructions + code.num_fixed, code.count - code.num_fixed);
      use(v, first, interpreter.keys, [&](int result, int key) -> const float* {
        return slots[code.results[result]] + ((code.varying >> result) & 1) * key * vector_lanes;
      });
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
