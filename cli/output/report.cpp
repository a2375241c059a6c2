#include "cli/output/report.h"

#include <algorithm>
#include <fstream>

#include "api/option_table.h"
#include "cli/output/format.h"
#include "cli/problem/mask_flag.h"

namespace flash_attention::cli {
namespace {

template <class T>
void add_option(Json& json, const char* name, const T& value) {
  json.add(name, value);
}
void add_option(Json& json, const char* name, float value) { json.add(name, static_cast<double>(value)); }
void add_option(Json& json, const char* name, Precision value) { json.add(name, to_string(value)); }
void add_option(Json& json, const char* name, const std::optional<float>& value) {
  if (value) json.add(name, static_cast<double>(*value));
}

Json counters_json(const emulator::Counters& c) {
  Json json = Json::object();
  json.add("blocks", c.blocks).add("threads", c.threads).add("shared_requests", c.shared_requests);
  json.add("shared_wavefronts", c.shared_wavefronts).add("shared_wavefronts_ideal", c.shared_wavefronts_ideal);
  json.add("global_requests", c.global_requests).add("global_sectors", c.global_sectors).add("bulk_bytes", c.bulk_bytes);
  json.add("mma_flops", c.mma_flops).add("wgmma_flops", c.wgmma_flops);
  json.add("tcgen05_flops", c.tcgen05_flops).add("fma_flops", c.fma_flops);
  return json.add("barrier_waits", c.barrier_waits).add("mbarrier_waits", c.mbarrier_waits);
}

}  // namespace

Json to_json(const Problem& p) {
  Json json = Json::object();
  json.add("batch", p.batch)
      .add("heads_q", p.heads_q)
      .add("heads_kv", p.heads_kv)
      .add("seq_q", p.seq_q)
      .add("seq_kv", p.seq_kv);
  json.add("head_dim", p.head_dim).add("head_dim_v", p.head_dim_v).add("dtype", to_string(p.dtype)).add("alibi", p.alibi);
#define FLASH_ATTENTION_ADD_same(name) add_option(json, #name, p.name);
#define FLASH_ATTENTION_ADD_call(name)
#define FLASH_ATTENTION_ADD(kind, name, default_value, argument, expected, form, scores) FLASH_ATTENTION_ADD_##form(name)
  FLASH_ATTENTION_CALL_OPTIONS(FLASH_ATTENTION_ADD)
  json.add("invariant", p.invariant);
#undef FLASH_ATTENTION_ADD
#undef FLASH_ATTENTION_ADD_call
#undef FLASH_ATTENTION_ADD_same
  if (const KeyList& list = p.key_list; list.kind != KeyListKind::none) {
    Json lists = Json::object();
    lists.add("kind", to_string(list.kind)).add("entries", list.entries).add("heads", list.heads);
    json.add("key_list", lists.add("block_q", list.block_q).add("block_kv", list.block_kv));
  }
  return json;
}

Json to_json(const DeviceInfo& info) {
  Json json = Json::object();
  json.add("device", to_string(info.device)).add("name", info.name);
  if (!device_traits(info.device).gpu_kernels) {
    json.add("isa", to_string(info.isa)).add("threads", info.threads).add("core_cache_bytes", info.core_cache_bytes);
  } else {
    json.add("arch", info.arch).add("num_sms", info.num_sms).add("shared_bytes", info.shared_bytes);
  }
  return json.add("l2_bytes", info.l2_bytes).add("memory_bytes", info.memory_bytes);
}

Json to_json(const Measurement& m) {
  Json json = Json::object();
  json.add("problem", to_json(m.problem))
      .add("pass", to_string(m.pass))
      .add("device", to_string(m.device))
      .add("kernel", m.kernel);
  if (m.timing.samples > 0) {
    Json time = Json::object();
    time.add("median_s", m.timing.median_s).add("low_s", m.timing.low_s).add("high_s", m.timing.high_s);
    json.add("time", time.add("samples", m.timing.samples));
    json.add("flops_per_second", m.flops_per_second()).add("kv_bytes_per_second", m.kv_bytes_per_second());
  }
  json.add("flops", flops(m.problem, m.pass) * visible_share(m.problem)).add("workspace_bytes", m.workspace_bytes);
  if (m.peak_extra_bytes >= 0) json.add("peak_extra_bytes", m.peak_extra_bytes);
  if (m.repaired_tiles >= 0) json.add("repaired_tiles", m.repaired_tiles);
  if (m.counters) json.add("counters", counters_json(*m.counters));
  Json accuracy = Json::array();
  for (const Accuracy& a : m.accuracy) {
    Json entry = Json::object();
    entry.add("tensor", a.tensor)
        .add("max_error", a.max_error)
        .add("relative_rms", a.relative_rms)
        .add("allowed", a.allowed);
    accuracy.push(entry.add("rows", a.rows).add("of_rows", a.of_rows).add("ok", a.ok()));
  }
  return json.add("accuracy", accuracy).add("ok", m.ok());
}

std::string describe(const DeviceInfo& info) {
  const std::string name = to_string(info.device) + ": " + info.name;
  if (!device_traits(info.device).gpu_kernels) {
    return name + ", " + std::string(to_string(info.isa)) +
           format(", %d thread%s", info.threads, info.threads == 1 ? "" : "s");
  }
  return name + format(", sm_%d, %d SMs", info.arch, info.num_sms);
}

std::string describe(const std::vector<Accuracy>& accuracy) {
  if (accuracy.empty()) return "not checked";
  double worst = 0;
  bool ok = true;
  for (const Accuracy& a : accuracy) {
    worst = std::max(worst, a.max_error);
    ok = ok && a.ok();
  }
  return format("%.1e %s", worst, ok ? "ok" : "WRONG");
}

void save(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << "\n";
  file.close();
  if (!file)
    throw Error(ErrorCode::invalid_argument,
                "--save: cannot write '" + path + "', allowed is a file in a folder that exists");
}

}  // namespace flash_attention::cli
