#include "cli/problem/mask_flag.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>

#include "flash_attention/error.h"

namespace flash_attention::cli {
namespace {

using Numbers = std::vector<std::int64_t>;

struct Kind {
  std::string_view name;
  std::size_t count;         // of numbers
  std::string_view program;  // $0 and $1 stand for them
  bool (*shows)(const Numbers& n, std::int64_t i, std::int64_t j);
  std::string_view form;
};

constexpr std::array<Kind, 5> kinds{{
    {"documents", 1, "a = floordiv i $0\nb = floordiv j $0\nsame = eq a b\npast = ge i j\nv = and same past\nvisible = v",
     [](const Numbers& n, std::int64_t i, std::int64_t j) { return i / n[0] == j / n[0] && j <= i; }, "documents:LENGTH"},
    {"documents_both", 1, "a = floordiv i $0\nb = floordiv j $0\nv = eq a b\nvisible = v",
     [](const Numbers& n, std::int64_t i, std::int64_t j) { return i / n[0] == j / n[0]; }, "documents_both:LENGTH"},
    {"prefix", 1, "first = lt j $0\npast = ge i j\nv = or first past\nvisible = v",
     [](const Numbers& n, std::int64_t i, std::int64_t j) { return j < n[0] || j <= i; }, "prefix:KEYS"},
    {"sink_window", 2,
     "d = sub i j\nnear = lt d $1\nfirst = lt j $0\nshown = or near first\npast = ge d 0\nv = and shown past\nvisible = v",
     [](const Numbers& n, std::int64_t i, std::int64_t j) { return j <= i && (j < n[0] || i - j < n[1]); },
     "sink_window:KEYS,WINDOW"},
    {"dilated", 2, "d = sub i j\nm = mod d $1\ne = abs d\nnear = le e $0\nhit = eq m 0\nv = and near hit\nvisible = v",
     [](const Numbers& n, std::int64_t i, std::int64_t j) { return std::llabs(i - j) <= n[0] && (i - j) % n[1] == 0; },
     "dilated:REACH,STEP"},
}};

const Kind& kind_of(std::string_view name) {
  return *std::ranges::find_if(kinds, [&](const Kind& kind) { return kind.name == name; });
}

/// The numbers with which a template gives this program; nothing if it cannot.
std::optional<Numbers> match(const Kind& kind, std::string_view text) {
  Numbers numbers(kind.count, -1);
  std::size_t at = 0;
  for (std::size_t n = 0; n < kind.program.size(); ++n) {
    if (kind.program[n] != '$') {
      if (at >= text.size() || text[at++] != kind.program[n]) return std::nullopt;
      continue;
    }
    std::int64_t& known = numbers[static_cast<std::size_t>(kind.program[++n] - '0')];
    std::int64_t found = 0;
    const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), found);
    if (error != std::errc() || (known >= 0 && known != found)) return std::nullopt;
    known = found;
    at = static_cast<std::size_t>(end - text.data());
  }
  if (at != text.size()) return std::nullopt;
  return numbers;
}

/// All of them, as they are written.
std::string mask_kinds() {
  std::string text;
  for (const Kind& kind : kinds) text += (text.empty() ? "" : ", ") + std::string(kind.form);
  return text;
}

}  // namespace

std::string MaskFlag::program() const {
  std::string text;
  const std::string_view form = kind_of(kind).program;
  for (std::size_t n = 0; n < form.size(); ++n) {
    if (form[n] == '$') {
      text += std::to_string(numbers[static_cast<std::size_t>(form[++n] - '0')]);
    } else {
      text += form[n];
    }
  }
  return text;
}

std::string MaskFlag::to_text() const {
  std::string text(kind);
  for (std::size_t n = 0; n < numbers.size(); ++n) text += (n == 0 ? ":" : ",") + std::to_string(numbers[n]);
  return text;
}

bool MaskFlag::shows(std::int64_t i, std::int64_t j) const { return kind_of(kind).shows(numbers, i, j); }

MaskFlag mask_from(std::string_view text) {
  const auto refuse = [&] {
    return Error(ErrorCode::invalid_argument,
                 "--mask: got '" + std::string(text) + "', allowed: " + mask_kinds() + " with numbers from 1 on");
  };
  const std::size_t colon = text.find(':');
  const auto kind = std::ranges::find_if(kinds, [&](const Kind& k) { return k.name == text.substr(0, colon); });
  if (colon == std::string_view::npos || kind == kinds.end()) throw refuse();
  Numbers numbers;
  const char *at = text.data() + colon, *const end = text.data() + text.size();
  while (at != end) {
    std::int32_t number = 0;  // programs count in 32 bits
    const auto [next, error] = std::from_chars(at + 1, end, number);
    if (error != std::errc() || number < 1 || (next != end && *next != ',')) throw refuse();
    numbers.push_back(number);
    at = next;
  }
  if (numbers.size() != kind->count) throw refuse();
  return {kind->name, std::move(numbers)};
}

std::optional<MaskFlag> mask_of(const Problem& problem) {
  for (const Kind& kind : kinds) {
    if (auto numbers = match(kind, problem.program)) return MaskFlag{kind.name, std::move(*numbers)};
  }
  return std::nullopt;
}

double visible_share(const Problem& p) {
  const std::optional<MaskFlag> mask = mask_of(p);
  if (!mask) return 1;
  const std::int64_t shift = p.alignment == Alignment::bottom_right ? p.seq_kv - p.seq_q : 0;
  const std::int64_t right = p.causal ? 0 : p.window_right;
  const std::int64_t step = std::max<std::int64_t>(p.seq_q / 512, 1);
  double all = 0, shown = 0;
  for (std::int64_t i = step / 2; i < p.seq_q; i += step) {
    std::int64_t begin = p.window_left < 0 ? 0 : std::max<std::int64_t>(0, i + shift - p.window_left);
    std::int64_t end = right < 0 ? p.seq_kv : std::min(p.seq_kv, i + shift + right + 1);
    if (const std::int64_t size = p.attention_chunk; size > 0) {
      const std::int64_t chunk = i + shift < 0 ? p.seq_kv : (i + shift) / size * size;
      begin = std::max(begin, chunk), end = std::min(end, chunk + size);
    }
    for (std::int64_t j = begin; j < end; ++j) ++all, shown += mask->shows(i, j) ? 1 : 0;
  }
  return all == 0 ? 1 : shown / all;
}

}  // namespace flash_attention::cli
