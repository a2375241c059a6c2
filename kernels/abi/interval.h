#pragma once

// Interval arithmetic for mask programs: the results that an operation can have if its arguments are in intervals. CPU
// and kernels use it to find tiles that are hidden or full. An interval contains all results that can occur, and may
// contain more. Plain functions: no includes.

namespace flash_attention::abi::interval {

/// Ints. If a result could leave 32 bits it would wrap around, so then nothing is known.
struct Ints {
  long long lo, hi;
};

/// Floats.
struct Reals {
  double lo, hi;
  bool may_be_nan;  // in addition to lo .. hi
};

/// Bools: which of the two values can occur.
struct Bools {
  bool can_be_true, can_be_false;
};

constexpr long long smallest = -2147483648ll, largest = 2147483647ll;
constexpr double unbounded = 1e300;

constexpr Ints any_int() { return {smallest, largest}; }
constexpr Reals any_real() { return {-unbounded, unbounded, true}; }
constexpr Bools any_bool() { return {true, true}; }

constexpr Ints checked(long long lo, long long hi) { return lo < smallest || hi > largest ? any_int() : Ints{lo, hi}; }
template <class T>
constexpr T less(T x, T y) {
  return x < y ? x : y;
}
template <class T>
constexpr T more(T x, T y) {
  return x > y ? x : y;
}

constexpr Ints constant(int value) { return {value, value}; }
constexpr Reals constant(float value) {
  if (value != value) return any_real();
  const bool infinite = value - value != 0;  // Inf - Inf may follow
  const double bounded = !infinite ? value : value > 0 ? unbounded : -unbounded;
  return {bounded, bounded, infinite};
}
constexpr Bools constant(bool value) { return {value, !value}; }

// ints

constexpr Ints add(Ints x, Ints y) { return checked(x.lo + y.lo, x.hi + y.hi); }
constexpr Ints sub(Ints x, Ints y) { return checked(x.lo - y.hi, x.hi - y.lo); }
constexpr Ints mul(Ints x, Ints y) {
  const long long a = x.lo * y.lo, b = x.lo * y.hi, c = x.hi * y.lo, d = x.hi * y.hi;
  return checked(less(less(a, b), less(c, d)), more(more(a, b), more(c, d)));
}
constexpr Ints neg(Ints x) { return checked(-x.hi, -x.lo); }
constexpr Ints abs(Ints x) {
  if (x.lo >= 0) return x;
  return x.hi <= 0 ? neg(x) : checked(0, more(-x.lo, x.hi));
}
constexpr Ints min(Ints x, Ints y) { return {less(x.lo, y.lo), less(x.hi, y.hi)}; }
constexpr Ints max(Ints x, Ints y) { return {more(x.lo, y.lo), more(x.hi, y.hi)}; }
/// For 32-bit numbers, as all bounds are: a 64-bit division takes a GPU some hundred instructions.
constexpr long long floor_quotient(long long x, long long y) {
  if (y == -1) return -x;
  const int from = static_cast<int>(x), by = static_cast<int>(y), quotient = from / by;
  return quotient - (quotient * by != from && (from < 0) != (by < 0) ? 1 : 0);
}
constexpr Ints floordiv(Ints x, Ints y) {
  if (y.lo <= 0 && y.hi >= 0) return any_int();
  const long long a = floor_quotient(x.lo, y.lo), c = floor_quotient(x.hi, y.lo);
  if (y.lo == y.hi) return checked(less(a, c), more(a, c));
  const long long b = floor_quotient(x.lo, y.hi), d = floor_quotient(x.hi, y.hi);
  return checked(less(less(a, b), less(c, d)), more(more(a, b), more(c, d)));
}
constexpr Ints mod(Ints x, Ints y) {
  if (y.lo <= 0) return y.hi < 0 ? Ints{y.lo + 1, 0} : any_int();
  if (x.lo >= 0 && x.hi < y.lo) return x;
  if (y.lo == y.hi && floor_quotient(x.lo, y.lo) == floor_quotient(x.hi, y.lo)) {
    const long long whole = floor_quotient(x.lo, y.lo) * y.lo;
    return {x.lo - whole, x.hi - whole};
  }
  return {0, y.hi - 1};
}
constexpr Ints logical_and(Ints x, Ints y) {
  if (x.lo < 0 && y.lo < 0) return any_int();
  return {0, x.lo < 0 ? y.hi : y.lo < 0 ? x.hi : less(x.hi, y.hi)};
}
constexpr Ints logical_or(Ints, Ints) { return any_int(); }
constexpr Ints logical_xor(Ints, Ints) { return any_int(); }
constexpr Ints logical_not(Ints x) { return {-1 - x.hi, -1 - x.lo}; }

// floats: an operation may round, so its bounds are widened a little

constexpr Reals rounded(double lo, double hi, bool may_be_nan) {
  const double far = 3e38, slack = 1e-6;
  if (!(lo > -far) || !(hi < far)) return {-unbounded, unbounded, true};
  return {lo - slack * (lo < 0 ? -lo : lo) - 1e-37, hi + slack * (hi < 0 ? -hi : hi) + 1e-37, may_be_nan};
}
constexpr Reals add(Reals x, Reals y) { return rounded(x.lo + y.lo, x.hi + y.hi, x.may_be_nan || y.may_be_nan); }
constexpr Reals sub(Reals x, Reals y) { return rounded(x.lo - y.hi, x.hi - y.lo, x.may_be_nan || y.may_be_nan); }
constexpr Reals mul(Reals x, Reals y) {
  const double product = more(more(x.hi, -x.lo), 0.0) * more(more(y.hi, -y.lo), 0.0);
  if (!(product < 1e38)) return any_real();
  const double a = x.lo * y.lo, b = x.lo * y.hi, c = x.hi * y.lo, d = x.hi * y.hi;
  return rounded(less(less(a, b), less(c, d)), more(more(a, b), more(c, d)), x.may_be_nan || y.may_be_nan);
}
constexpr Reals div(Reals x, Reals y) {
  if (!(y.lo > 1e-30) && !(y.hi < -1e-30)) return any_real();
  return mul(x, Reals{1 / y.hi, 1 / y.lo, y.may_be_nan});
}
constexpr Reals neg(Reals x) { return {-x.hi, -x.lo, x.may_be_nan}; }
constexpr Reals abs(Reals x) {
  if (x.lo >= 0) return x;
  return x.hi <= 0 ? neg(x) : Reals{0, more(-x.lo, x.hi), x.may_be_nan};
}
constexpr Reals min(Reals x, Reals y) { return {less(x.lo, y.lo), less(x.hi, y.hi), x.may_be_nan || y.may_be_nan}; }
constexpr Reals max(Reals x, Reals y) { return {more(x.lo, y.lo), more(x.hi, y.hi), x.may_be_nan || y.may_be_nan}; }

// comparisons

constexpr bool may_be_nan(Ints) { return false; }
constexpr bool may_be_nan(Reals x) { return x.may_be_nan; }

template <class T>
constexpr Bools lt(T x, T y) {
  if (may_be_nan(x) || may_be_nan(y)) return any_bool();
  return {x.lo < y.hi, x.hi >= y.lo};
}
template <class T>
constexpr Bools le(T x, T y) {
  if (may_be_nan(x) || may_be_nan(y)) return any_bool();
  return {x.lo <= y.hi, x.hi > y.lo};
}
template <class T>
constexpr Bools gt(T x, T y) {
  return lt(y, x);
}
template <class T>
constexpr Bools ge(T x, T y) {
  return le(y, x);
}
template <class T>
constexpr Bools eq(T x, T y) {
  if (may_be_nan(x) || may_be_nan(y)) return any_bool();
  return {x.lo <= y.hi && y.lo <= x.hi, x.lo != x.hi || y.lo != y.hi || x.lo != y.lo};
}

// logic

constexpr Bools logical_not(Bools x) { return {x.can_be_false, x.can_be_true}; }
template <class T>
constexpr Bools ne(T x, T y) {
  return logical_not(eq(x, y));
}
constexpr Bools logical_and(Bools x, Bools y) { return {x.can_be_true && y.can_be_true, x.can_be_false || y.can_be_false}; }
constexpr Bools logical_or(Bools x, Bools y) { return {x.can_be_true || y.can_be_true, x.can_be_false && y.can_be_false}; }
constexpr Bools logical_xor(Bools x, Bools y) {
  return {(x.can_be_true && y.can_be_false) || (x.can_be_false && y.can_be_true),
          (x.can_be_true && y.can_be_true) || (x.can_be_false && y.can_be_false)};
}

constexpr Ints either(Ints x, Ints y) { return {less(x.lo, y.lo), more(x.hi, y.hi)}; }
constexpr Reals either(Reals x, Reals y) { return {less(x.lo, y.lo), more(x.hi, y.hi), x.may_be_nan || y.may_be_nan}; }
constexpr Bools either(Bools x, Bools y) { return {x.can_be_true || y.can_be_true, x.can_be_false || y.can_be_false}; }
template <class T>
constexpr T where(Bools condition, T yes, T no) {
  if (!condition.can_be_false) return yes;
  return condition.can_be_true ? either(yes, no) : no;
}

// pieces: if a remainder wraps around inside of a tile, it takes all values, and nothing follows. Between multiples of
// its period it does not wrap, so a tile is cut there.

/// The common period of two; 0: none.
constexpr int common_period(int x, int y) {
  if (y <= 0) return x;
  while (x > 0) {
    const int rest = y % x;
    y = x;
    x = rest;
  }
  return y;
}
constexpr int piece_end(int begin, int end, int period) {
  if (period <= 0) return end;
  return static_cast<int>(less((begin / period + 1ll) * period, static_cast<long long>(end)));
}
constexpr long long num_pieces(int begin, int end, int period) {
  return period <= 0 ? 1 : (end - 1) / period - begin / period + 1;
}
constexpr int max_pieces = 64;

/// seen(i_begin, i_end, j_begin, j_end) of a tile. If that is neither always nor never, it is evaluated for the pieces
/// of the tile.
template <class Seen>
constexpr Bools in_pieces(int i_begin, int i_end, int j_begin, int j_end, int i_period, int j_period, Seen seen) {
  const Bools whole = seen(i_begin, i_end, j_begin, j_end);
  const long long pieces = num_pieces(i_begin, i_end, i_period) * num_pieces(j_begin, j_end, j_period);
  if (!whole.can_be_true || !whole.can_be_false || pieces == 1 || pieces > max_pieces) return whole;
  Bools found{false, false};
  for (int i = i_begin; i < i_end; i = piece_end(i, i_end, i_period)) {
    for (int j = j_begin; j < j_end; j = piece_end(j, j_end, j_period)) {
      found = either(found, seen(i, piece_end(i, i_end, i_period), j, piece_end(j, j_end, j_period)));
      if (found.can_be_true && found.can_be_false) return found;
    }
  }
  return found;
}

// conversions

constexpr Reals to_float(Ints x) {
  constexpr long long exact = 1 << 24;
  if (x.lo >= -exact && x.hi <= exact) return {static_cast<double>(x.lo), static_cast<double>(x.hi), false};
  return rounded(static_cast<double>(x.lo), static_cast<double>(x.hi), false);
}
constexpr Reals to_float(Bools x) { return {x.can_be_false ? 0.0 : 1.0, x.can_be_true ? 1.0 : 0.0, false}; }
constexpr Ints to_int(Bools x) { return {x.can_be_false ? 0 : 1, x.can_be_true ? 1 : 0}; }
constexpr Ints to_int(Reals x) {
  if (x.may_be_nan || x.lo < -2e9 || x.hi > 2e9) return any_int();
  return {static_cast<long long>(x.lo), static_cast<long long>(x.hi)};
}

}  // namespace flash_attention::abi::interval
