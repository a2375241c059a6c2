#include "fuzz/generator/sight.h"

namespace flash_attention::fuzz {
namespace {

/// A property of levels, looked up: arrays ask for it millions of times.
class Property {
 public:
  explicit Property(bool (*property)(Factor, int level, std::string_view name)) {
    for (int factor = 0; factor < num_factors; ++factor) {
      const Factor f = static_cast<Factor>(factor);
      for (int level = 0; level < static_cast<int>(levels_of(f).size()); ++level)
        of_[factor].push_back(property(f, level, levels_of(f)[level]));
    }
  }
  bool has(int factor, int level) const { return of_[factor][level] != 0; }
  int count(const Row& row) const {
    int levels = 0;
    for (int factor = 0; factor < num_factors; ++factor) levels += row[factor] >= 0 && has(factor, row[factor]);
    return levels;
  }

 private:
  std::vector<char> of_[num_factors];
};

bool blank_level(Factor factor, int, std::string_view name) {
  switch (factor) {
    case queries:
    case keys:
    case batch:
      return name == "0";
    case inputs:
      return name == "zeros" || name == "denormal";
    case scale:
      return name == "zero";
    default:
      return false;
  }
}

bool dull_level(Factor factor, int, std::string_view name) {
  switch (factor) {
    case softcap:
      return name == "narrow";
    case program:
      return name == "score" || name == "both";
    case keys:
      return name == "1";
    case inputs:
      return name != "normal" && name != "ties";
    case slopes:
    case sinks:
      return name.starts_with("strong");
    default:
      return false;
  }
}

bool hiding_level(Factor factor, int level, std::string_view name) {
  switch (factor) {
    case window:
    case chunk:
    case mask:
    case hidden_rows:
    case block_mask:
    case left_padding:
    case key_lengths:
    case seqused_kv:
      return level != 0;
    case program:
      return name == "mask" || name == "both" || name == "hides";
    case inputs:
      return name == "infinite_bias";
    default:
      return false;
  }
}

const Property& blank() {
  static const Property property(blank_level);
  return property;
}
const Property& dull() {
  static const Property property(dull_level);
  return property;
}
const Property& hiding() {
  static const Property property(hiding_level);
  return property;
}

}  // namespace

bool is_blank(int factor, int level) { return blank().has(factor, level); }
bool is_dull(int factor, int level) { return dull().has(factor, level); }
bool hides_keys(int factor, int level) { return hiding().has(factor, level); }

bool is_blank(const Row& row) { return blank().count(row) > 0; }
int num_dull(const Row& row) { return dull().count(row); }
int num_hiding(const Row& row) { return hiding().count(row); }

}  // namespace flash_attention::fuzz
