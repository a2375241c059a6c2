#include "program/source.h"

#include <bit>
#include <cstdint>

#include "program/expressions.h"
#include "program/row_terms.h"
#include "program/seen.h"
#include "program/stages.h"

namespace flash_attention::program {
namespace {

constexpr const char* device = "  __device__ __forceinline__ ";

const char* type_name(Type type) { return type == Type::real ? "float" : type == Type::integer ? "int" : "bool"; }

bool is_leaf(const Node& node) { return num_args(node.op) == 0; }

/// Some values of a program and when each is computed. What a later stage needs of an earlier one has a name: a member of
/// Program, of its Row or of its Key.
class Part {
 public:
  Part(const Program& program, std::vector<Node> nodes, char letter, const std::vector<int>& roots, bool short_sequences)
      : program_(program), nodes_(std::move(nodes)), stages_(stages_of(nodes_)), letter_(letter), short_(short_sequences) {
    needed_.resize(nodes_.size());
    kept_.resize(nodes_.size());
    for (const int root : roots) {
      if (root >= 0) needed_[static_cast<std::size_t>(root)] = kept_[static_cast<std::size_t>(root)] = true;
    }
    for (std::size_t n = nodes_.size(); n-- > 0;) {
      if (!needed_[n]) continue;
      for (const int arg : nodes_[n].args) {
        if (arg < 0) continue;
        needed_[static_cast<std::size_t>(arg)] = true;
        if (stages_[static_cast<std::size_t>(arg)] != stages_[n]) kept_[static_cast<std::size_t>(arg)] = true;
      }
    }
    for (std::size_t n = 0; n < nodes_.size(); ++n) kept_[n] = kept_[n] && !is_leaf(nodes_[n]) && stages_[n] != Stage::pair;
  }

  /// The members that hold what is computed in a stage.
  std::string members(Stage stage) const {
    std::string text;
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (kept_[n] && stages_[n] == stage)
        text += std::string("    ") + type_name(nodes_[n].type) + " " + member(static_cast<int>(n)) + ";\n";
    }
    return text;
  }

  /// The lines that compute what is needed in a stage and store its members in `into`.
  std::string lines(Stage stage, const std::string& into) const {
    std::string text;
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (!needed_[n] || stages_[n] != stage || is_leaf(nodes_[n])) continue;
      text += line(static_cast<int>(n));
      if (kept_[n]) text += "    " + into + member(static_cast<int>(n)) + " = " + value(static_cast<int>(n)) + ";\n";
    }
    return text;
  }

  /// The lines that compute `roots` for a pair, from its row and key.
  std::string pair_lines(const std::vector<int>& roots) const {
    std::vector<bool> wanted(nodes_.size(), false);
    for (const int root : roots) {
      if (root >= 0) wanted[static_cast<std::size_t>(root)] = true;
    }
    std::string text;
    for (std::size_t n = nodes_.size(); n-- > 0;) {
      if (!wanted[n] || stages_[n] != Stage::pair || is_leaf(nodes_[n])) continue;
      text = line(static_cast<int>(n)) + text;
      for (const int arg : nodes_[n].args) {
        if (arg >= 0) wanted[static_cast<std::size_t>(arg)] = true;
      }
    }
    return text;
  }

  /// A node as it is called in the code of a stage.
  std::string name(int n, Stage stage) const {
    const Node& node = nodes_[static_cast<std::size_t>(n)];
    const Stage made = stages_[static_cast<std::size_t>(n)];
    if (made == stage && !is_leaf(node)) return value(n);
    const std::string before = made == stage || made == Stage::head ? "" : made == Stage::row ? "row." : "key.";
    if (is_leaf(node)) return before + number(program_, node, value);
    return before + member(n);
  }

 private:
  std::string member(int n) const { return letter_ + std::to_string(n); }

  std::string line(int n) const {
    const Node& node = nodes_[static_cast<std::size_t>(n)];
    const Stage stage = stages_[static_cast<std::size_t>(n)];
    const bool index = node.op == Op::to_float && is_leaf(nodes_[static_cast<std::size_t>(node.args[0])]) &&
                       (stage == Stage::row || stage == Stage::key);
    const auto argument = [&](int arg) { return name(arg, stage); };
    return "    const auto " + value(n) + " = " +
           (index && short_ ? "program::index_as_float(first, distance)" : number(program_, node, argument)) + ";\n";
  }

  const Program& program_;
  std::vector<Node> nodes_;
  std::vector<Stage> stages_;
  char letter_;
  bool short_;
  std::vector<bool> needed_, kept_;
};

class Writer {
 public:
  Writer(const Program& program, std::uint32_t gradients, std::int64_t longest)
      : program_(program), gradients_(gradients), short_(longest <= short_length) {
    std::vector<int> roots{program.score, -1};
    std::vector<Node> nodes = in_floats(program.nodes, longest, roots);
    score_ = roots[0];
    if (score_ >= 0) {
      largest_ = largest_magnitude(nodes, score_);
      slope_ = slope(nodes);
      derive_tensors(nodes);
    }
    roots = {score_, slope_};
    for (const Derivative& d : derivatives_) roots.insert(roots.end(), {d.offset, d.derivative});
    keep_values(nodes, roots);
    score_ = roots[0], slope_ = roots[1];
    for (std::size_t n = 0; n < derivatives_.size(); ++n) {
      derivatives_[n].offset = roots[2 * n + 2], derivatives_[n].derivative = roots[2 * n + 3];
    }
    parts_.emplace_back(program_, nodes, 's', roots, short_);
    if (program.visible >= 0) terms_ = row_terms(program.nodes, program.visible);
    roots = {program.visible};
    for (const RowTerm& term : terms_) roots.insert(roots.end(), term.roots.begin(), term.roots.end());
    parts_.emplace_back(program_, program.nodes, 'm', roots, short_);
  }

  std::string run() const {
    std::string text =
        "#include \"tile/program.cuh\"\n\nnamespace flash_attention::tile {\n\ntemplate <>\nstruct Program<true> {\n";
    text += "  static constexpr float largest = __builtin_bit_cast(float, " +
            hexadecimal(std::bit_cast<std::uint32_t>(largest_)) + ");  // no score is larger\n";
    text += "  struct Row {\n    int i;\n" + members(Stage::row) + "  };\n";
    text += "  struct Key {\n    int j;\n" + members(Stage::key) + "  };\n\n";
    text += "  const abi::ProgramArgs& args;\n  int b, h;\n" + members(Stage::head) + "\n";
    text += std::string(device) + "Program(const abi::AttentionArgs& given, int batch_idx, int head_idx)\n";
    text += "      : args(given.program), b(batch_idx), h(head_idx) {\n" + lines(Stage::head, "") + "  }\n\n";
    text += stage_function("Row row", "i", Stage::row) + stage_function("Key key", "j", Stage::key);
    if (program_.score >= 0) text += score() + score_and_slope() + derivatives();
    if (program_.visible >= 0) text += visible() + terms() + seen_source(program_);
    return text + "};\n\n}  // namespace flash_attention::tile\n\n";
  }

 private:
  static constexpr std::int64_t short_length = 1 << 22;  // indices and small differences of them are floats

  struct Derivative {
    int tensor, offset, derivative;
  };

  std::string members(Stage stage) const { return parts_[0].members(stage) + parts_[1].members(stage); }
  std::string lines(Stage stage, const std::string& into) const {
    std::string text;
    for (const Part& part : parts_) {
      const std::string found = part.lines(stage, into);
      if (!found.empty()) text += "    {\n" + found + "    }\n";
    }
    return text;
  }

  /// The data that a row or a key has for all of its pairs. Its index is in two parts: the second is a literal where loops
  /// are unrolled.
  std::string stage_function(const char* what, const char* index, Stage stage) const {
    const std::string type = std::string(what).substr(0, 3);
    return device + std::string(what) + "(int first, int distance = 0) const {\n    const int " + index +
           " = first + distance;\n    " + type + " result{" + index + "};\n" + lines(stage, "result.") +
           "    return result;\n  }\n";
  }

  int slope(std::vector<Node>& nodes) const {
    int by = -1;
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      if (nodes[n].op == Op::score) by = static_cast<int>(n);
    }
    return by < 0 ? -1 : derive(nodes, score_, by);
  }

  void derive_tensors(std::vector<Node>& nodes) {
    const std::size_t count = nodes.size();
    for (std::size_t n = 0; n < count; ++n) {
      const Node node = nodes[n];
      if (node.op != Op::load || (gradients_ >> node.index & 1u) == 0) continue;
      const int derivative = derive(nodes, score_, static_cast<int>(n));
      if (derivative < 0) continue;
      Node offset = node;
      offset.op = Op::offset;
      offset.type = Type::integer;
      nodes.push_back(offset);
      derivatives_.push_back({node.index, static_cast<int>(nodes.size()) - 1, derivative});
    }
  }

  std::string score() const {
    return std::string(device) + "float score(float score, const Row& row, const Key& key) const {\n" +
           parts_[0].pair_lines({score_}) + "    return " + pair(score_) + ";\n  }\n";
  }

  std::string score_and_slope() const {
    return std::string(device) + "float score(float score, const Row& row, const Key& key, float& slope) const {\n" +
           parts_[0].pair_lines({score_, slope_}) + "    slope *= " + (slope_ < 0 ? "0.0f" : pair(slope_)) +
           ";\n    return " + pair(score_) + ";\n  }\n";
  }

  /// use(tensor, place, derivative) for each read that has a gradient.
  std::string derivatives() const {
    std::vector<int> roots;
    for (const Derivative& d : derivatives_) roots.insert(roots.end(), {d.offset, d.derivative});
    std::string body = parts_[0].pair_lines(roots);
    for (const Derivative& d : derivatives_)
      body += "    use(" + std::to_string(d.tensor) + ", " + pair(d.offset) + ", " + pair(d.derivative) + ");\n";
    return "  template <typename Use>\n" + std::string(device) +
           "void derivatives(float score, const Row& row, const Key& key, Use use) const {\n" + body + "  }\n";
  }

  std::string visible() const {
    return std::string(device) + "bool visible(const Row& row, const Key& key) const {\n" +
           parts_[1].pair_lines({program_.visible}) + "    return " + parts_[1].name(program_.visible, Stage::pair) +
           ";\n  }\n";
  }

  /// The mask in parts: what each term says, and which rows it cannot tell apart.
  std::string terms() const {
    const Part& mask = parts_[1];
    std::string says, alike;
    for (std::size_t n = 0; n < terms_.size(); ++n) {
      const std::string condition = "    if constexpr (term == " + std::to_string(n) + ") {\n";
      std::string value, same = "true";
      for (const int root : terms_[n].roots) value += (value.empty() ? "" : " && ") + mask.name(root, Stage::pair);
      for (const int v : terms_[n].row_values) {
        const std::string name = mask.name(v, Stage::pair).substr(4);  // behind "row."
        same += " && program::same(x." + name + ", y." + name + ")";
      }
      says += condition + mask.pair_lines(terms_[n].roots) + "    return " + value + ";\n    }\n";
      alike += condition + "    return " + same + ";\n    }\n";
    }
    const std::string head = std::string("  template <int term>\n") + device + "bool ";
    return "  static constexpr int num_terms = " + std::to_string(terms_.size()) + ";\n" + head +
           "term_sees(const Row& row, const Key& key) const {\n" + says + "    return true;\n  }\n" + head +
           "alike(const Row& x, const Row& y) const {\n" + alike + "    return false;\n  }\n";
  }

  std::string pair(int node) const { return parts_[0].name(node, Stage::pair); }

  const Program& program_;
  std::uint32_t gradients_;
  bool short_;
  float largest_ = 0;
  int score_ = -1, slope_ = -1;
  std::vector<Derivative> derivatives_;
  std::vector<RowTerm> terms_;
  std::vector<Part> parts_;  // the score, the mask
};

}  // namespace

std::string cuda_source(Program program, const SourceOptions& options) {
  for (Node& node : program.nodes) {
    if (node.op == Op::load && (options.empty >> node.index & 1u) != 0) node = {.op = Op::literal, .type = node.type};
  }
  return Writer(program, options.gradients, options.longest).run();
}

}  // namespace flash_attention::program
