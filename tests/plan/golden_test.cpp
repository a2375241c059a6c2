// Golden plans: what the planner chooses for a wide list of problems, against the records in tests/plan/golden/.
//
// A line of a record is of a group of problems: a hash of the whole texts of their plans (launches, configurations,
// workspace, tensor maps, all reasons), and the kernels and tiles. If a change is meant, `tools/golden_plans.py` shows the
// difference of the whole texts, and `tools/golden_plans.py --update` writes the records anew.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "flash_attention/attention.h"
#include "fuzz/generator/problems.h"
#include "launch/tensor_maps.h"

namespace flash_attention {
namespace {

struct Named {
  std::string group, name;
  Problem problem;
};

/// The covering array over what a kernel takes, with short and with long sequences.
void add_arrays(const char* kernel, std::vector<Named>& list) {
  const fuzz::Sizes shorter, longer{.longest = 20000, .max_products = 1e14};
  for (const auto& [name, sizes] : {std::pair{"short", shorter}, std::pair{"long", longer}}) {
    for (const fuzz::GeneratedProblem& drawn : fuzz::problems(kernel, 1, 1, sizes)) {
      list.push_back({std::string(kernel) + ' ' + name + ' ' + std::to_string(drawn.number / 40),
                      std::to_string(drawn.number), drawn.c.problem});
    }
  }
}

/// Usual sizes, by which tiles, splits and schedules are chosen, and each option of a model that is served or trained.
void add_models(std::vector<Named>& list) {
  struct Size {
    std::int64_t batch, heads_q, heads_kv, seq_q, seq_kv;
  };
  constexpr Size sizes[] = {{1, 8, 8, 128, 128},    {4, 32, 32, 512, 512},     {8, 32, 8, 1024, 1024},
                            {1, 64, 8, 4096, 4096}, {4, 16, 16, 4096, 4096},   {1, 16, 1, 16384, 16384},
                            {2, 12, 12, 197, 197},  {64, 32, 8, 1, 4096},      {1, 64, 4, 1, 131072},
                            {8, 32, 8, 4, 1024},    {1, 32, 8, 512, 32768},    {2, 40, 8, 77, 8192},
                            {256, 8, 8, 100, 100},  {32, 128, 128, 2048, 2048}};
  using Change = void (*)(Problem&);
  constexpr std::pair<const char*, Change> changes[] = {
      {"plain", [](Problem&) {}},
      {"causal", [](Problem& p) { p.causal = true; }},
      {"window", [](Problem& p) { p.causal = true, p.window_left = 1024; }},
      {"narrow", [](Problem& p) { p.window_left = p.window_right = 60; }},
      {"deterministic", [](Problem& p) { p.causal = p.deterministic = true; }},
      {"dropout", [](Problem& p) { p.dropout_p = 0.1f; }},
      {"softcap", [](Problem& p) { p.causal = true, p.softcap = 30; }},
      {"alibi", [](Problem& p) { p.causal = p.alibi = true; }},
      {"sink", [](Problem& p) { p.causal = p.sink = true, p.window_left = 127; }},
      {"bias",
       [](Problem& p) {
         p.bias = {.present = true, .dtype = p.dtype, .head_stride = p.seq_q * p.seq_kv, .q_stride = p.seq_kv};
       }},
      {"mask", [](Problem& p) { p.mask = {.present = true, .batch_stride = p.seq_q * p.seq_kv, .q_stride = p.seq_kv}; }},
      {"rows", [](Problem& p) { p.causal = true, p.hidden_rows = {.bounds = 2}; }},
      {"blocks", [](Problem& p) { p.block_mask = {.block_q = 128, .block_kv = 128, .q_stride = (p.seq_kv + 127) / 128}; }},
      {"lengths", [](Problem& p) { p.causal = p.seqused_kv = true; }},
      {"packed",
       [](Problem& p) {
         p.causal = p.packed = true, p.total_q = p.batch * p.seq_q / 2, p.total_kv = p.batch * p.seq_kv / 2;
       }},
      {"pages",
       [](Problem& p) {
         p.causal = p.seqused_kv = true, p.page_size = 64, p.num_pages = p.batch * p.seq_kv / 64 + 1,
         p.page_table_stride = p.seq_kv / 64 + 1;
       }},
      {"narrow_keys", [](Problem& p) { p.kv_dtype = Dtype::float8_e4m3, p.kv_scales = ScaleKind::head; }},
      {"narrow_queries",
       [](Problem& p) { p.kv_dtype = p.q_dtype = Dtype::float8_e4m3, p.kv_scales = p.q_scales = ScaleKind::head; }},
      {"invariant", [](Problem& p) { p.causal = p.invariant = true; }},
      {"fast_float32", [](Problem& p) { p.dtype = Dtype::float32, p.precision = Precision::fast; }},
      {"latent", [](Problem& p) { p.head_dim = 576, p.head_dim_v = 512, p.latent = true, p.heads_kv = 1; }},
  };
  for (const auto& [name, change] : changes) {
    for (const Size& size : sizes) {
      for (const std::int64_t head_dim : {64, 96, 128, 192, 256, 512}) {
        Problem p{.batch = size.batch,
                  .seq_q = size.seq_q,
                  .seq_kv = size.seq_kv,
                  .heads_q = size.heads_q,
                  .heads_kv = size.heads_kv,
                  .head_dim = head_dim,
                  .dtype = Dtype::bfloat16};
        if (head_dim == 192) p.head_dim_v = 128;
        change(p);
        if (p.latent && head_dim != 64) continue;
        list.push_back({std::string(name) + ' ' + std::to_string(size.batch) + 'x' + std::to_string(size.heads_q) + '/' +
                            std::to_string(size.heads_kv) + 'x' + std::to_string(size.seq_q) + 'x' +
                            std::to_string(size.seq_kv),
                        std::to_string(head_dim), p});
      }
    }
  }
}

const std::vector<Named>& problems(bool gpu) {
  static const auto make = [](bool for_gpu) {
    std::vector<Named> list;
    if (for_gpu) {
      for (const char* kernel :
           {"forward/portable", "forward/sm80", "backward/sm80", "forward/tf32", "backward/tf32", "forward/sm90",
            "backward/sm90", "forward/sm90_fp8", "forward/sm89_fp8", "decode/sm80", "decode/sm90", "decode/mla_sm90"})
        add_arrays(kernel, list);
    } else {
      for (const char* kernel : {"cpu/prefill", "cpu/decode", "cpu/bfloat16"}) add_arrays(kernel, list);
    }
    add_models(list);
    return list;
  };
  static const std::vector<Named> of_gpu = make(true), of_cpu = make(false);
  return gpu ? of_gpu : of_cpu;
}

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return std::string(text, 10);
}

/// Addresses by which a map shows what it is of.
void* address(std::uintptr_t number) { return reinterpret_cast<void*>(number << 20); }  // NOLINT

void describe_maps(const Plan& plan, std::ostream& out) {
  Buffers b{.q = address(1), .k = address(2), .v = address(3), .out = address(4), .bias = address(5), .dout = address(6)};
  for (const launch::TensorMapSpec& map : launch::tensor_maps(plan, b, address(7))) {
    out << "map        " << map.slot << " of " << reinterpret_cast<std::uintptr_t>(map.data) << ", type "
        << static_cast<int>(map.dtype) << ", swizzle " << map.swizzle_bytes;
    for (int i = 0; i < map.rank; ++i) {
      out << ", " << map.sizes[i] << " in " << map.box[i];
      if (i > 0) out << " by " << map.strides_bytes[i - 1];
    }
    out << '\n';
  }
}

/// All that a plan holds.
std::string describe(const Plan& plan) {
  std::ostringstream out;
  out << to_string(plan);
  out << "zeroed     " << plan.zeroed_bytes << ", shared rows " << plan.shared_rows << ", repairs " << plan.counts_repairs
      << "\noffsets   ";
  for (const std::int64_t offset : plan.workspace_offsets) out << ' ' << offset;
  out << "\nmask       " << plan.mask.present << ' ' << plan.mask.launches << ' ' << plan.mask.begin << ' '
      << plan.mask.zeroed_bytes << "\ncpu        " << plan.cpu.heads_together << ' ' << plan.cpu.copies_keys << ' '
      << plan.cpu.packs_keys << ' ' << plan.cpu.cache_resident_bytes << '\n';
  for (const Launch& launch : plan.launches) {
    out << "of launch  " << launch.entry << ": " << launch.min_blocks_per_sm << ' ' << launch.prefer_shared_carveout << ' '
        << launch.programmatic_launch << ' ' << launch.arguments;
    if (!launch.prelude.empty()) out << ", program " << hex(hash_of(launch.prelude));
    out << '\n';
  }
  describe_maps(plan, out);
  return out.str();
}

struct Device {
  std::string name;
  DeviceInfo info;
  std::size_t every;  // of so many problems one is planned
};

std::vector<Device> devices_of_records() {
  std::vector<Device> all;
  for (const int arch : {75, 80, 86, 90, 100, 120})
    all.push_back({"sm_" + std::to_string(arch), typical_gpu(arch), arch == 80 || arch == 90 ? 1u : 7u});
  for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::neon, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx}) {
    DeviceInfo cpu{.name = "CPU", .isa = isa, .threads = 16, .core_cache_bytes = 2 << 20};
    cpu.memory_bytes = std::int64_t{1} << 37, cpu.l2_bytes = 64 << 20;
    all.push_back({"cpu_" + std::string(to_string(isa)), cpu, isa == CpuIsa::avx2 || isa == CpuIsa::amx ? 1u : 7u});
  }
  return all;
}

/// Sentences without their numbers.
std::string without_numbers(const std::string& sentence) {
  std::string words;
  for (const char c : sentence) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit || words.empty() || words.back() != '#') words += digit ? '#' : c;
  }
  return words;
}

class Record {
 public:
  /// Problems of one group, one after another, share a line.
  void add(const std::string& group, const Named& of, Pass pass, const DeviceInfo& device, std::string_view kernel = {}) {
    Problem problem = of.problem;
    if (pass == Pass::forward || pass == Pass::standard_forward) problem.program_gradients = 0;
    std::string text, summary = "refused";
    try {
      const Plan plan = make_plan(problem, pass, device, kernel);
      text = describe(plan);
      summary = plan.kernel + ' ' + std::to_string(plan.block_q) + 'x' + std::to_string(plan.block_kv);
      for (const Candidate& candidate : plan.candidates) {
        if (!candidate.reason.empty()) ++sentences_[candidate.kernel + ": " + without_numbers(candidate.reason)];
      }
      for (const Launch& launch : plan.launches) ++sentences_["launch " + launch.entry + " of " + launch.unit];
    } catch (const Error& error) {
      text = error.what();
      ++sentences_["refused: " + without_numbers(text)];
    }
    texts_ += "=== " + group + ' ' + of.name + '\n' + text + '\n';
    if (groups_.empty() || groups_.back().name != group) groups_.push_back({.name = group});
    Group& last = groups_.back();
    last.text += text;
    ++last.summaries[summary];
  }

  /// A line for each group, then each sentence and launch with how often it occurs.
  std::string lines() const {
    std::string all;
    for (const Group& group : groups_) {
      all += group.name + ' ' + hex(hash_of(group.text));
      for (const auto& [summary, count] : group.summaries) {
        all += ", " + std::to_string(count) + " x " + summary;
      }
      all += '\n';
    }
    for (const auto& [sentence, count] : sentences_) all += std::to_string(count) + " x " + sentence + '\n';
    return all;
  }
  const std::string& texts() const { return texts_; }

 private:
  struct Group {
    std::string name, text{};
    std::map<std::string, int> summaries{};
  };
  std::vector<Group> groups_;
  std::map<std::string, int> sentences_;
  std::string texts_;
};

Record record_of(const Device& device) {
  Record record;
  const bool gpu = device_traits(device.info.device).gpu_kernels;
  const std::vector<Named>& all = problems(gpu);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (std::size_t n = 0; n < all.size(); n += device.every) {
      record.add(std::string(to_string(pass)) + ' ' + all[n].group, all[n], pass, device.info);
    }
  }
  // By name, what the planner would not choose: each kernel says what it does not take.
  for (const KernelSummary& kernel : kernels()) {
    if (device_traits(kernel.device).gpu_kernels != gpu || device.every != 1) continue;
    for (std::size_t n = 0; n < all.size(); n += 7) {
      record.add(std::string(to_string(kernel.pass)) + " by name " + kernel.name, all[n], kernel.pass, device.info,
                 kernel.name);
    }
  }
  return record;
}

void write(const std::filesystem::path& path, const std::string& text) { std::ofstream(path) << text; }

std::string read(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// The first lines that differ.
std::string difference(const std::string& record, const std::string& now) {
  std::istringstream x(record), y(now);
  std::string text, before, after;
  int shown = 0;
  while (shown < 10) {
    const bool more = static_cast<bool>(std::getline(x, before)), others = static_cast<bool>(std::getline(y, after));
    if (!more && !others) break;
    if (!more) before.clear();
    if (!others) after.clear();
    if (before == after) continue;
    text += "- " + before + "\n+ " + after + '\n';
    ++shown;
  }
  return text;
}

/// FLASH_ATTENTION_GOLDEN_PLANS names a folder that gets the whole texts and the new records; tools/golden_plans.py.
TEST(Golden, PlansAreThoseOfTheRecord) {
  const std::filesystem::path golden = std::filesystem::path(FLASH_ATTENTION_ROOT) / "tests/plan/golden";
  const char* const folder = std::getenv("FLASH_ATTENTION_GOLDEN_PLANS");
  for (const Device& device : devices_of_records()) {
    const Record record = record_of(device);
    if (folder != nullptr) {
      write(std::filesystem::path(folder) / (device.name + ".record"), record.lines());
      write(std::filesystem::path(folder) / (device.name + ".plans"), record.texts());
    } else {
      EXPECT_TRUE(read(golden / (device.name + ".txt")) == record.lines())
          << device.name << ": plans differ from the record; tools/golden_plans.py shows how\n"
          << difference(read(golden / (device.name + ".txt")), record.lines());
    }
  }
}

}  // namespace
}  // namespace flash_attention
