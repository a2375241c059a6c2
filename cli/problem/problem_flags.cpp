#include "cli/problem/problem_flags.h"

#include <charconv>

#include "cli/output/format.h"
#include "cli/problem/mask_flag.h"

namespace flash_attention::cli {

std::vector<Flag> operator+(std::vector<Flag> a, const std::vector<Flag>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Dtype dtype_from(std::string_view text) {
  if (text == "float32" || text == "fp32") return Dtype::float32;
  if (text == "float16" || text == "fp16") return Dtype::float16;
  if (text == "bfloat16" || text == "bf16") return Dtype::bfloat16;
  throw Error(ErrorCode::invalid_argument, "--dtype: got '" + std::string(text) + "', allowed: float32, float16, bfloat16");
}

Precision precision_from(std::string_view text) {
  for (const Precision precision : {Precision::automatic, Precision::ieee, Precision::fast, Precision::tf32}) {
    if (text == to_string(precision)) return precision;
  }
  throw Error(ErrorCode::invalid_argument, "--precision: got '" + std::string(text) + "', allowed: auto, ieee, fast, tf32");
}

Dtype narrow_dtype_from(const char* flag, std::string_view text) {
  if (text == "e4m3" || text == "float8_e4m3") return Dtype::float8_e4m3;
  if (text == "e5m2" || text == "float8_e5m2") return Dtype::float8_e5m2;
  for (const Dtype dtype : {Dtype::int8, Dtype::nvfp4, Dtype::mxfp4, Dtype::int4}) {
    if (text == to_string(dtype)) return dtype;
  }
  throw Error(ErrorCode::invalid_argument, "--" + std::string(flag) + ": got '" + std::string(text) +
                                               "', allowed: e4m3, e5m2, int8, nvfp4, mxfp4, int4");
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

namespace {

/// Two sizes with a mark between them, and nothing else.
TileSize tile_from(const char* flag, const std::string& text, const char* format, const char* example) {
  TileSize tile;
  char rest = 0;
  if (std::sscanf(text.c_str(), format, &tile.block_q, &tile.block_kv, &rest) != 2 || tile.block_q <= 0 ||
      tile.block_kv <= 0) {
    throw Error(ErrorCode::invalid_argument,
                std::string(flag) + ": got '" + text + "', allowed: two whole numbers, such as " + example);
  }
  return tile;
}

}  // namespace

Pass pass_from(const Arguments& arguments) {
  if (arguments.on("tangent")) return Pass::tangent;
  if (arguments.on("second")) return Pass::second;
  return arguments.on("backward") ? Pass::backward : Pass::forward;
}

KernelChoice kernel_from(const Arguments& arguments, std::string_view text) {
  KernelChoice choice{.name = std::string(text.substr(0, text.find('@')))};
  if (choice.name.size() < text.size()) {
    choice.tile = tile_from("--kernel NAME@QxKV", std::string(text.substr(choice.name.size() + 1)), "%dx%d%c", "128x64");
  }
  if (arguments.given("tile")) choice.tile = tile_from("--tile", arguments.text("tile"), "%d,%d%c", "128,64");
  return choice;
}

KernelChoice kernel_from(const Arguments& arguments) { return kernel_from(arguments, arguments.text("kernel")); }

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

namespace {

using Text = std::string;
long long whole(std::int64_t value) { return value; }

/// A flag, what it makes of a problem, and what a line for people says of it.
struct ProblemFlag {
  Flag flag;
  void (*set)(Problem&, const Arguments&);
  Text (*tell)(const Problem&) = [](const Problem&) { return Text(); };
};

void set_window(Problem& problem, const Arguments& arguments) {
  if (!arguments.given("window")) return;
  const Text text = arguments.text("window");
  long long left = 0, right = 0;
  char rest = 0;
  if (std::sscanf(text.c_str(), "%lld,%lld%c", &left, &right, &rest) != 2 || left < -1 || right < -1) {
    throw Error(ErrorCode::invalid_argument,
                "--window: got '" + text + "', allowed: two whole numbers of at least -1, such as 128,0");
  }
  problem.window_left = left;
  problem.window_right = right;
}

/// Lists of keys or of blocks. Which they are is drawn with the inputs (measure/workload.h).
void set_lists(Problem& problem, const Arguments& arguments) {
  const bool keys = arguments.given("key-indices"), blocks = arguments.given("key-blocks");
  if (keys && blocks) throw Error(ErrorCode::invalid_argument, "--key-blocks: --key-indices is given, too; allowed is one");
  if (arguments.given("key-block-size") && !blocks) {
    throw Error(ErrorCode::invalid_argument, "--key-block-size: it belongs to --key-blocks, which is not given");
  }
  if (arguments.given("list-heads") && !keys && !blocks) {
    throw Error(ErrorCode::invalid_argument, "--list-heads: it belongs to --key-indices or --key-blocks; none is given");
  }
  if (!keys && !blocks) return;
  KeyList& list = problem.key_list;
  list.kind = keys ? KeyListKind::keys : KeyListKind::blocks;
  list.entries = arguments.integer(keys ? "key-indices" : "key-blocks", 0);
  list.heads = arguments.integer("list-heads", 1);
  if (!blocks) return;
  const TileSize size = tile_from("--key-block-size", arguments.text("key-block-size"), "%d,%d%c", "1,64");
  list.block_q = size.block_q, list.block_kv = size.block_kv;
}

Text tell_lists(const Problem& problem) {
  const KeyList& list = problem.key_list;
  if (list.kind == KeyListKind::none) return {};
  Text text = format(", %lld listed %s", whole(list.entries), std::string(to_string(list.kind)).c_str());
  if (list.kind == KeyListKind::blocks) text += format(" of %lldx%lld", whole(list.block_q), whole(list.block_kv));
  return text + (list.heads != 1 ? format(" (%lld heads)", whole(list.heads)) : Text());
}

// One row for each flag, in the order of the help and of the description. A default that follows another flag is after it.
const ProblemFlag flag_table[] = {
    {{"batch", "N", "sequences in the batch", "1"},
     [](Problem& p, const Arguments& a) { p.batch = a.integer("batch", 0); },
     [](const Problem& p) { return format("batch %lld", whole(p.batch)); }},
    {{"heads", "N", "query heads", "8"},
     [](Problem& p, const Arguments& a) { p.heads_q = a.integer("heads", 1); },
     [](const Problem& p) { return format(", heads %lld", whole(p.heads_q)); }},
    {{"kv-heads", "N", "key and value heads; divides --heads (GQA, MQA) [= --heads]"},
     [](Problem& p, const Arguments& a) { p.heads_kv = a.given("kv-heads") ? a.integer("kv-heads", 1) : p.heads_q; },
     [](const Problem& p) { return p.heads_kv != p.heads_q ? format(" (kv %lld)", whole(p.heads_kv)) : Text(); }},
    {{"seq-q", "N", "queries in a sequence", "1024"},
     [](Problem& p, const Arguments& a) { p.seq_q = a.integer("seq-q", 0); },
     [](const Problem& p) { return format(", %lld", whole(p.seq_q)); }},
    {{"seq-kv", "N", "keys in a sequence [= --seq-q]"},
     [](Problem& p, const Arguments& a) { p.seq_kv = a.given("seq-kv") ? a.integer("seq-kv", 0) : p.seq_q; },
     [](const Problem& p) { return format(" x %lld", whole(p.seq_kv)); }},
    {{"head-dim", "N", "width of a query and a key: at most 576, fast if a multiple of 8", "64"},
     [](Problem& p, const Arguments& a) { p.head_dim = a.integer("head-dim", 1); },
     [](const Problem& p) { return format(", head_dim %lld", whole(p.head_dim)); }},
    {{"head-dim-v", "N", "width of a value [= --head-dim]"},
     [](Problem& p, const Arguments& a) { p.head_dim_v = a.given("head-dim-v") ? a.integer("head-dim-v", 1) : p.head_dim; },
     [](const Problem& p) {
       const bool other = p.head_dim_v != 0 && p.head_dim_v != p.head_dim;
       return other ? format(" (v %lld)", whole(p.head_dim_v)) : Text();
     }},
    {{"dtype", "T", "float32, float16 or bfloat16 (fp32, fp16, bf16)", "float32"},
     [](Problem& p, const Arguments& a) { p.dtype = dtype_from(a.text("dtype")); },
     [](const Problem& p) { return ", " + Text(to_string(p.dtype)); }},
    {{"precision", "P", "of float32 on a GPU: ieee, or on tensor cores auto (= fast, three products) or tf32 (one)",
      "auto"},
     [](Problem& p, const Arguments& a) { p.precision = precision_from(a.text("precision")); },
     [](const Problem& p) {
       return p.precision == Precision::automatic ? Text() : Text(", precision ") + Text(to_string(p.precision));
     }},
    {{"causal", "", "a query sees no key after the diagonal"},
     [](Problem& p, const Arguments& a) { p.causal = a.on("causal"); },
     [](const Problem& p) { return Text(p.causal ? ", causal" : ""); }},
    {{"mask", "KIND:N,..",
      "documents:LENGTH, documents_both:LENGTH, prefix:KEYS, sink_window:KEYS,WINDOW or dilated:REACH,STEP, as a program; "
      "TFLOP/s are over what it shows"},
     [](Problem& p, const Arguments& a) {
       if (a.given("mask")) p.program = mask_from(a.text("mask")).program();
     },
     [](const Problem& p) {
       const auto mask = mask_of(p);
       return mask ? ", mask " + mask->to_text() : Text();
     }},
    {{"window", "L,R", "a query sees L keys before the diagonal and R after it; -1 = all"},
     set_window,
     [](const Problem& p) {
       const bool any = p.window_left >= 0 || p.window_right >= 0;
       return any ? format(", window %lld,%lld", whole(p.window_left), whole(p.window_right)) : Text();
     }},
    {{"chunk", "N", "a query sees the keys of its own chunk of N positions; 0 = all", "0"},
     [](Problem& p, const Arguments& a) { p.attention_chunk = a.integer("chunk", 0); },
     [](const Problem& p) {
       return p.attention_chunk != 0 ? format(", chunks of %lld", whole(p.attention_chunk)) : Text();
     }},
    {{"softcap", "C", "scores become C * tanh(score / C); 0 = off", "0"},
     [](Problem& p, const Arguments& a) { p.softcap = static_cast<float>(a.number("softcap")); },
     [](const Problem& p) { return p.softcap != 0 ? format(", softcap %g", double{p.softcap}) : Text(); }},
    {{"alibi", "", "linear distance penalty with the usual slopes 2^(-8 h / heads)"},
     [](Problem& p, const Arguments& a) { p.alibi = a.on("alibi"); },
     [](const Problem& p) { return Text(p.alibi ? ", alibi" : ""); }},
    {{"kv-dtype", "T", "K and V in 8 bits: e4m3, e5m2 or int8; in 4: nvfp4, mxfp4 or int4 [= --dtype]"},
     [](Problem& p, const Arguments& a) {
       if (a.given("kv-dtype")) p.kv_dtype = narrow_dtype_from("kv-dtype", a.text("kv-dtype"));
     },
     [](const Problem& p) { return p.kv_dtype ? ", keys of " + Text(to_string(*p.kv_dtype)) : Text(); }},
    {{"kv-group", "N", "columns that share a scale, of int4: 32, 64 or 128; 0 = those of the format", "0"},
     [](Problem& p, const Arguments& a) { p.kv_group = a.integer("kv-group", 0); },
     [](const Problem& p) { return p.kv_group != 0 ? format(" in groups of %lld", whole(p.kv_group)) : Text(); }},
    {{"kv-scales", "S", "of 8-bit K and V: none, tensor, head (of each sequence) or token; of nvfp4: none or tensor",
      "none"},
     [](Problem& p, const Arguments& a) { p.kv_scales = scales_from("kv-scales", a.text("kv-scales")); },
     [](const Problem& p) {
       return p.kv_scales != ScaleKind::none ? ", scales of " + Text(to_string(p.kv_scales)) : Text();
     }},
    {{"q-dtype", "T", "Q in 8 bits, with K and V of that type: e4m3 or e5m2 [= --dtype, which is out's]"},
     [](Problem& p, const Arguments& a) {
       if (a.given("q-dtype")) p.q_dtype = narrow_dtype_from("q-dtype", a.text("q-dtype"));
     },
     [](const Problem& p) { return p.q_dtype ? ", queries of " + Text(to_string(*p.q_dtype)) : Text(); }},
    {{"q-scales", "S", "of 8-bit Q: none, tensor or head (of each sequence and key head)", "none"},
     [](Problem& p, const Arguments& a) { p.q_scales = scales_from("q-scales", a.text("q-scales")); },
     [](const Problem& p) {
       return p.q_scales != ScaleKind::none ? ", their scales of " + Text(to_string(p.q_scales)) : Text();
     }},
    {{"page-size", "N", "K and V in pages of N rows, in no order, and lengths that the device reads; 0 = no pages", "0"},
     [](Problem& p, const Arguments& a) { put_in_pages(p, a.integer("page-size", 0)); },
     [](const Problem& p) { return p.page_size != 0 ? format(", pages of %lld", whole(p.page_size)) : Text(); }},
    {{"key-indices", "N",
      "each query sees N keys of a list of its own: different ones, drawn at random, with --causal of those before it"},
     set_lists,
     tell_lists},
    {{"key-blocks", "N", "the same by blocks of keys; with --causal its own block is among them"},
     [](Problem&, const Arguments&) {}},
    {{"key-block-size", "Q,KV", "of --key-blocks: queries that share a list, and keys of a block", "1,64"},
     [](Problem&, const Arguments&) {}},
    {{"list-heads", "N", "lists of a query: 1 for all heads, or one for each of --kv-heads (--key-blocks: or of --heads)",
      "1"},
     [](Problem&, const Arguments&) {}},
    {{"dropout", "P", "drops probabilities with probability P in [0, 1)", "0"},
     [](Problem& p, const Arguments& a) { p.dropout_p = static_cast<float>(a.number("dropout")); },
     [](const Problem& p) { return p.dropout_p != 0 ? format(", dropout %g", double{p.dropout_p}) : Text(); }},
    {{"deterministic", "", "backward gives the same bits in every run"},
     [](Problem& p, const Arguments& a) { p.deterministic = a.on("deterministic"); }},
    {{"invariant", "", "a row has the same bits, and a sequence the same gradients, whatever else is in the call"},
     [](Problem& p, const Arguments& a) { p.invariant = p.invariant || a.on("invariant"); },
     [](const Problem& p) { return Text(p.invariant ? ", invariant" : ""); }},
};

}  // namespace

std::vector<Flag> problem_flags() {
  std::vector<Flag> flags;
  for (const ProblemFlag& row : flag_table) flags.push_back(row.flag);
  return flags +
         std::vector<Flag>{
             {"device", "D", "cpu, cuda, cuda:N, emulator or best", "best"},
             {"arch", "A", "architecture that the emulator plays (sm_80, sm_89, sm_90, sm_100, sm_120), or of the plan (sm_75 to sm_121)"},
             {"kernel", "NAME", "use this kernel instead of the planner's choice; `plan` lists them"},
             {"tile", "Q,KV",
              "queries and keys of a tile of a GPU's forward kernel, for experiments; refused if it does not fit"},
         };
}

Problem problem_from(const Arguments& arguments) {
  Problem problem;
  for (const ProblemFlag& row : flag_table) row.set(problem, arguments);
  return problem;
}

std::string describe(const Problem& problem) {
  std::string text;
  for (const ProblemFlag& row : flag_table) text += row.tell(problem);
  return text;
}

}  // namespace flash_attention::cli
