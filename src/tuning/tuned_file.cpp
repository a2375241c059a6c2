#include "tuning/tuned_file.h"

#include <algorithm>

#include "flash_attention/version.h"
#include "support/json.h"
#include "support/json_value.h"
#include "support/sha256.h"
#include "tuning/problem_json.h"

namespace flash_attention::tuning {
namespace {

using support::Json;
using support::JsonValue;

constexpr std::string_view format = "flash_attention tuned 1";
constexpr std::string_view seal = ",\n  \"sha256\": \"";

std::string hash_of(std::string_view text) { return support::to_hex(support::sha256(text)); }

Json json_of(const Place& place) {
  Json json = Json::object();
  json.add("kind", place.kind).add("name", place.name);
  if (place.arch != 0) return json.add("arch", place.arch).add("num_sms", place.num_sms);
  return json.add("isa", place.isa).add("threads", place.threads);
}

Json json_of(const plan::Tuned::Entry& entry) {
  const plan::Choice& choice = entry.tuned.choice;
  Json json = Json::object();
  json.add("pass", to_string(entry.pass)).add("problem", to_json(entry.problem));
  if (!choice.kernel.empty()) json.add("kernel", choice.kernel);  // otherwise the planner's own is the fastest
  if (choice.block_q != 0) json.add("block_q", choice.block_q).add("block_kv", choice.block_kv);
  if (choice.num_stages != 0) json.add("num_stages", choice.num_stages);
  if (choice.num_splits != 0) json.add("num_splits", choice.num_splits);
  return json.add("instead_of", entry.tuned.instead_of).add("gain", entry.tuned.gain).add("noise", entry.tuned.noise);
}

Json json_of(const plan::Verdict& verdict) {
  Json json = Json::object();
  json.add("kernel", verdict.kernel).add("pass", to_string(verdict.pass)).add("passed", verdict.passed);
  return verdict.reason.empty() ? json : json.add("reason", verdict.reason);
}

int small_number(const JsonValue& value, const std::string& name) {
  constexpr double most = 1 << 20;
  const double number = value.number();
  if (!(number >= 0 && number <= most)) refuse(name, "a number of it is out of range");
  return static_cast<int>(number);
}

Place place_in(const JsonValue& json, const std::string& name) {
  const JsonValue& device = json["device"];
  return {.kind = device["kind"].text(),
          .name = device["name"].text(),
          .arch = small_number(device["arch"], name),
          .num_sms = small_number(device["num_sms"], name),
          .isa = device["isa"].text(),
          .threads = small_number(device["threads"], name),
          .driver = json["driver"].text(),
          .library = json["library"].text()};
}

plan::Tuned::Entry entry_in(const JsonValue& json, const std::string& name) {
  const double gain = json["gain"].number(), noise = json["noise"].number();
  if (!(gain >= 1) || !(noise >= 0)) refuse(name, "a choice of it gains nothing");
  return {.problem = problem_of(json["problem"], name + ": problem"),
          .pass = pass_of(json["pass"].text(), name + ": pass"),
          .tuned = {.choice = {.kernel = json["kernel"].text(),
                               .block_q = small_number(json["block_q"], name),
                               .block_kv = small_number(json["block_kv"], name),
                               .num_stages = small_number(json["num_stages"], name),
                               .num_splits = small_number(json["num_splits"], name)},
                    .instead_of = json["instead_of"].text(),
                    .gain = gain,
                    .noise = noise}};
}

std::string describe(const Place& place) {
  const std::string cores = place.arch != 0
                                ? "sm_" + std::to_string(place.arch) + ", " + std::to_string(place.num_sms) + " SMs"
                                : place.isa + ", " + std::to_string(place.threads) + " threads";
  return place.name + " (" + cores + ")";
}

}  // namespace

Place place_of(const DeviceInfo& device, const std::string& driver) {
  const bool gpu = device_traits(device.device).gpu_kernels;
  return {.kind = std::string(to_string(device.device.kind)),
          .name = device.name,
          .arch = gpu ? device.arch : 0,
          .num_sms = gpu ? device.num_sms : 0,
          .isa = gpu ? std::string() : std::string(to_string(device.isa)),
          .threads = gpu ? 0 : device.threads,
          .driver = driver,
          .library = FLASH_ATTENTION_VERSION};
}

std::string to_text(const TunedFile& file) {
  Json choices = Json::array();
  std::vector<plan::Tuned::Entry> entries = file.entries;
  const auto key = [](const plan::Tuned::Entry& entry) {
    return std::string(to_string(entry.pass)) + to_json(entry.problem).text();
  };
  std::ranges::sort(entries, {}, key);  // so that a committed file changes only where a choice does
  for (const plan::Tuned::Entry& entry : entries) choices.push(json_of(entry));
  Json verdicts = Json::array();
  for (const plan::Verdict& verdict : file.verdicts) verdicts.push(json_of(verdict));
  Json json = Json::object();
  json.add("format", format).add("library", file.place.library).add("device", json_of(file.place));
  json.add("driver", file.place.driver).add("choices", choices).add("verdicts", verdicts);
  std::string text = json.text();
  text.resize(text.size() - 2);  // without the last brace and its line
  return text + std::string(seal) + hash_of(text) + "\"\n}\n";
}

TunedFile parse_tuned(std::string_view text, const std::string& name) {
  if (text.find(format) == std::string_view::npos) refuse(name, "it is no file of tuned choices (`flash-attention tune --export`)");
  const std::size_t end = text.rfind(seal);
  if (end == std::string_view::npos || text.substr(end + seal.size(), 64) != hash_of(text.substr(0, end)) ||
      text.substr(end + seal.size() + 64) != "\"\n}\n")
    refuse(name, "it is damaged: its hash is another");
  const JsonValue json = JsonValue::parse(text, name);
  if (json["format"].text() != format) refuse(name, "its format is another, '" + json["format"].text() + "'");
  TunedFile file;
  file.place = place_in(json, name);
  for (const JsonValue& entry : json["choices"].items()) file.entries.push_back(entry_in(entry, name));
  for (const JsonValue& verdict : json["verdicts"].items()) {
    file.verdicts.push_back({.kernel = verdict["kernel"].text(),
                             .pass = pass_of(verdict["pass"].text(), name + ": pass"),
                             .passed = verdict["passed"].flag(),
                             .reason = verdict["reason"].text()});
  }
  return file;
}

void require_place(const TunedFile& file, const Place& here, const std::string& name) {
  if (file.place.library != here.library)
    refuse(name, "it is of version " + file.place.library + " of the library, and this is " + here.library);
  const Place& there = file.place;
  if (there.kind != here.kind || there.name != here.name || there.arch != here.arch || there.num_sms != here.num_sms ||
      there.isa != here.isa || there.threads != here.threads)
    refuse(name, "it was measured on " + describe(there) + ", and this is " + describe(here));
}

}  // namespace flash_attention::tuning
