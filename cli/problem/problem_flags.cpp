#include "cli/problem/problem_flags.h"

#include <charconv>

#include "cli/output/format.h"
#include "cli/problem/mask_flag.h"

namespace flash_attention::cli {

std::vector<Flag> operator+(std::vector<Flag> a, const std::vector<Flag>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<Flag> problem_flags() {
  return {
      {"batch", "N", "sequences in the batch", "1"},
      {"heads", "N", "query heads", "8"},
      {"kv-heads", "N", "key and value heads; divides --heads (GQA, MQA) [= --heads]"},
      {"seq-q", "N", "queries in a sequence", "1024"},
      {"seq-kv", "N", "keys in a sequence [= --seq-q]"},
      {"head-dim", "N", "width of a query and a key: at most 576, fast if a multiple of 8", "64"},
      {"head-dim-v", "N", "width of a value [= --head-dim]"},
      {"dtype", "T", "float32, float16 or bfloat16 (fp32, fp16, bf16)", "float32"},
      {"precision", "P", "of float32 on a GPU: ieee, or fast on tensor cores, with errors up to 4 times as large", "ieee"},
      {"causal", "", "a query sees no key after the diagonal"},
      {"window", "L,R", "a query sees L keys before the diagonal and R after it; -1 = all"},
      {"chunk", "N", "a query sees the keys of its own chunk of N positions; 0 = all", "0"},
      {"mask", "KIND:N,..",
       "documents:LENGTH, documents_both:LENGTH, prefix:KEYS, sink_window:KEYS,WINDOW or dilated:REACH,STEP, as a program; "
       "TFLOP/s are over what it shows"},
      {"softcap", "C", "scores become C * tanh(score / C); 0 = off", "0"},
      {"alibi", "", "linear distance penalty with the usual slopes 2^(-8 h / heads)"},
      {"dropout", "P", "drops probabilities with probability P in [0, 1)", "0"},
      {"page-size", "N", "K and V in pages of N rows, in no order, and lengths that the device reads; 0 = no pages", "0"},
      {"kv-dtype", "T", "K and V in 8 bits: e4m3, e5m2 or int8 [= --dtype]"},
      {"q-dtype", "T", "Q in 8 bits, with K and V of that type: e4m3 or e5m2 [= --dtype, which is out's]"},
      {"q-scales", "S", "of 8-bit Q: none, tensor or head (of each sequence and key head)", "none"},
      {"kv-scales", "S", "of 8-bit K and V: none, tensor, head (of each sequence) or token", "none"},
      {"deterministic", "", "backward gives the same bits in every run"},
      {"invariant", "", "forward gives a row the same bits whatever else is in the call"},
      {"device", "D", "cpu, cuda, cuda:N, emulator or best", "best"},
      {"arch", "A", "architecture the emulator plays (sm_80, sm_90), or that a plan is made for (sm_75 to sm_121)"},
      {"kernel", "NAME", "use this kernel instead of the planner's choice; `plan` lists them"},
      {"tile", "Q,KV",
       "queries and keys of a tile of a GPU's forward kernel, for experiments; refused where it does not fit"},
  };
}

Dtype dtype_from(std::string_view text) {
  if (text == "float32" || text == "fp32") return Dtype::float32;
  if (text == "float16" || text == "fp16") return Dtype::float16;
  if (text == "bfloat16" || text == "bf16") return Dtype::bfloat16;
  throw Error(ErrorCode::invalid_argument, "--dtype: got '" + std::string(text) + "', allowed: float32, float16, bfloat16");
}

Precision precision_from(std::string_view text) {
  if (text == "ieee") return Precision::ieee;
  if (text == "fast") return Precision::fast;
  throw Error(ErrorCode::invalid_argument, "--precision: got '" + std::string(text) + "', allowed: ieee, fast");
}

Dtype narrow_dtype_from(const char* flag, std::string_view text) {
  if (text == "e4m3" || text == "float8_e4m3") return Dtype::float8_e4m3;
  if (text == "e5m2" || text == "float8_e5m2") return Dtype::float8_e5m2;
  if (text == "int8") return Dtype::int8;
  throw Error(ErrorCode::invalid_argument,
              "--" + std::string(flag) + ": got '" + std::string(text) + "', allowed: e4m3, e5m2, int8");
}

ScaleKind scales_from(const char* flag, std::string_view text) {
  for (const ScaleKind kind : {ScaleKind::none, ScaleKind::tensor, ScaleKind::head, ScaleKind::token}) {
    if (text == to_string(kind)) return kind;
  }
  throw Error(ErrorCode::invalid_argument,
              "--" + std::string(flag) + ": got '" + std::string(text) + "', allowed: none, tensor, head, token");
}

int arch_from(std::string_view text) {
  std::string_view digits = text.starts_with("sm_") ? text.substr(3) : text;
  if (digits.ends_with("a")) digits.remove_suffix(1);
  int arch = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), arch);
  if (error != std::errc() || end != digits.data() + digits.size() || arch < 50 || arch > 999) {
    throw Error(ErrorCode::invalid_argument, "--arch: got '" + std::string(text) + "', allowed: sm_80, sm_90 and the like");
  }
  return arch;
}

std::string kernel_from(const Arguments& arguments, std::string_view name) {
  if (!arguments.given("tile")) return std::string(name);
  const std::string text = arguments.text("tile");
  int queries = 0, keys = 0;
  char rest = 0;
  if (std::sscanf(text.c_str(), "%d,%d%c", &queries, &keys, &rest) != 2 || queries <= 0 || keys <= 0) {
    throw Error(ErrorCode::invalid_argument, "--tile: got '" + text + "', allowed: two whole numbers, such as 128,64");
  }
  return std::string(name) + "@" + std::to_string(queries) + "x" + std::to_string(keys);
}

std::string kernel_from(const Arguments& arguments) { return kernel_from(arguments, arguments.text("kernel")); }

Device device_from(const Arguments& arguments) {
  const std::string name = arguments.text("device");
  Device device = name == "best" ? best_device() : parse_device(name);
  if (arguments.given("arch")) {
    const int arch = arch_from(arguments.text("arch"));
    if (device_traits(device).emulated) {
      device.emulated_arch = arch;
    } else if (!device_traits(device).gpu_kernels) {
      throw Error(ErrorCode::invalid_argument, "--arch: the device is cpu, allowed with --device emulator or cuda");
    }
  }
  return device;
}

void put_in_pages(Problem& problem, std::int64_t page_size) {
  if (page_size == 0) return;
  problem.page_size = page_size;
  problem.page_table_stride = (problem.seq_kv + page_size - 1) / page_size;
  problem.num_pages = problem.batch * problem.page_table_stride;
  problem.seqused_kv = true;
}

Problem problem_from(const Arguments& arguments) {
  Problem problem;
  problem.batch = arguments.integer("batch", 0);
  problem.heads_q = arguments.integer("heads", 1);
  problem.heads_kv = arguments.given("kv-heads") ? arguments.integer("kv-heads", 1) : problem.heads_q;
  problem.seq_q = arguments.integer("seq-q", 0);
  problem.seq_kv = arguments.given("seq-kv") ? arguments.integer("seq-kv", 0) : problem.seq_q;
  problem.head_dim = arguments.integer("head-dim", 1);
  problem.head_dim_v = arguments.given("head-dim-v") ? arguments.integer("head-dim-v", 1) : problem.head_dim;
  problem.dtype = dtype_from(arguments.text("dtype"));
  problem.precision = precision_from(arguments.text("precision"));
  problem.causal = arguments.on("causal");
  if (arguments.given("window")) {
    const std::string text = arguments.text("window");
    long long left = 0, right = 0;
    char rest = 0;
    if (std::sscanf(text.c_str(), "%lld,%lld%c", &left, &right, &rest) != 2 || left < -1 || right < -1) {
      throw Error(ErrorCode::invalid_argument,
                  "--window: got '" + text + "', allowed: two whole numbers of at least -1, such as 128,0");
    }
    problem.window_left = left;
    problem.window_right = right;
  }
  problem.attention_chunk = arguments.integer("chunk", 0);
  if (arguments.given("mask")) problem.program = mask_from(arguments.text("mask")).program();
  problem.softcap = static_cast<float>(arguments.number("softcap"));
  problem.alibi = arguments.on("alibi");
  problem.dropout_p = static_cast<float>(arguments.number("dropout"));
  problem.deterministic = arguments.on("deterministic");
  problem.invariant = arguments.on("invariant");
  if (arguments.given("kv-dtype")) problem.kv_dtype = narrow_dtype_from("kv-dtype", arguments.text("kv-dtype"));
  problem.kv_scales = scales_from("kv-scales", arguments.text("kv-scales"));
  if (arguments.given("q-dtype")) problem.q_dtype = narrow_dtype_from("q-dtype", arguments.text("q-dtype"));
  problem.q_scales = scales_from("q-scales", arguments.text("q-scales"));
  put_in_pages(problem, arguments.integer("page-size", 0));
  return problem;
}

std::string describe(const Problem& problem) {
  const auto n = [](std::int64_t value) { return static_cast<long long>(value); };
  std::string text = format("batch %lld, heads %lld", n(problem.batch), n(problem.heads_q));
  if (problem.heads_kv != problem.heads_q) text += format(" (kv %lld)", n(problem.heads_kv));
  text += format(", %lld x %lld, head_dim %lld", n(problem.seq_q), n(problem.seq_kv), n(problem.head_dim));
  if (problem.head_dim_v != 0 && problem.head_dim_v != problem.head_dim) text += format(" (v %lld)", n(problem.head_dim_v));
  text += ", " + std::string(to_string(problem.dtype));
  if (problem.precision == Precision::fast) text += ", precision fast";
  if (problem.causal) text += ", causal";
  if (const auto mask = mask_of(problem)) text += ", mask " + mask->to_text();
  if (problem.window_left >= 0 || problem.window_right >= 0) {
    text += format(", window %lld,%lld", n(problem.window_left), n(problem.window_right));
  }
  if (problem.attention_chunk != 0) text += format(", chunks of %lld", n(problem.attention_chunk));
  if (problem.softcap != 0) text += format(", softcap %g", static_cast<double>(problem.softcap));
  if (problem.alibi) text += ", alibi";
  if (problem.kv_dtype) text += ", keys of " + std::string(to_string(*problem.kv_dtype));
  if (problem.kv_scales != ScaleKind::none) text += ", scales of " + std::string(to_string(problem.kv_scales));
  if (problem.q_dtype) text += ", queries of " + std::string(to_string(*problem.q_dtype));
  if (problem.q_scales != ScaleKind::none) text += ", their scales of " + std::string(to_string(problem.q_scales));
  if (problem.page_size != 0) text += format(", pages of %lld", n(problem.page_size));
  if (problem.dropout_p != 0) text += format(", dropout %g", static_cast<double>(problem.dropout_p));
  if (problem.invariant) text += ", invariant";
  return text;
}

}  // namespace flash_attention::cli
