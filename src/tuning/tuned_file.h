#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/tuned.h"

namespace flash_attention::tuning {

/// Where something was measured. Results are found again by it, and refused elsewhere.
struct Place {
  std::string kind;  // "cuda", "cpu"
  std::string name;
  int arch = 0;
  int num_sms = 0;
  std::string isa;  // CPU
  int threads = 0;  // CPU
  std::string driver;
  std::string library;  // its version

  friend bool operator==(const Place&, const Place&) = default;
};

Place place_of(const DeviceInfo& device, const std::string& driver);

/// The measurements of a place, as a file that people can read, send and commit.
struct TunedFile {
  Place place;
  std::vector<plan::Tuned::Entry> entries;
  std::vector<plan::Verdict> verdicts;
};

/// JSON, the entries in a fixed order; its last line is a hash of the rest.
std::string to_text(const TunedFile& file);

/// The inverse. Throws Error(invalid_argument), which names `name` and the mistake, if the text is damaged or not a
/// tuned file.
TunedFile parse_tuned(std::string_view text, const std::string& name);

/// Refuses a file of another device or another version of the library. The driver may differ: it does not compile.
void require_place(const TunedFile& file, const Place& here, const std::string& name);

}  // namespace flash_attention::tuning
