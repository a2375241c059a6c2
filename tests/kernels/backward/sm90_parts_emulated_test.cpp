// backward/sm90 block by block, in the emulator: dQ is one sum over all blocks, dK and dV are those of each block.
#include "kernels/emulated.h"
#include "support/oracle/memory.h"
#include "support/oracle/rounding.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

constexpr Device parts_device{.kind = DeviceKind::emulator, .emulated_arch = 90};
constexpr int part_rows = 200;

/// Queries [q_begin, q_end) and keys [kv_begin, kv_end) of the whole.
struct PartBlock {
  std::int64_t q_begin, q_end, kv_begin, kv_end;
};

Case parts_case(std::int64_t head_dim) {
  Case c;
  c.name = "parts_" + std::to_string(head_dim);
  c.problem = {.batch = 1, .seq_q = part_rows, .seq_kv = part_rows, .heads_q = 2, .heads_kv = 2, .head_dim = head_dim};
  c.problem.dtype = Dtype::bfloat16, c.problem.causal = true;
  return c;
}

/// A pass over blocks on one workspace, of a causal square.
class PartsOfAPass {
 public:
  explicit PartsOfAPass(const Case& c)
      : c_(c), expected_(expect(c, true)), memory_(memory_of(parts_device)), tensors_(c, expected_.inputs, *memory_) {
    Results exact = expected_.want;
    for (double& x : exact.out) x = round_to(c.problem.dtype, x);
    tensors_.set_forward(exact);
  }

  void run(const BackwardPart& part, const PartBlock& block) {
    const Buffers& all = tensors_.buffers();
    Problem p = c_.problem;
    p.seq_q = block.q_end - block.q_begin, p.seq_kv = block.kv_end - block.kv_begin;
    p.causal = false, p.window_right = block.q_begin - block.kv_begin, p.alignment = Alignment::top_left;
    const std::int64_t of_q = block.q_begin * p.heads_q * p.head_dim, of_kv = block.kv_begin * p.heads_kv * p.head_dim;
    const auto at = [](const void* data, std::int64_t elements) {
      return static_cast<char*>(const_cast<void*>(data)) + elements * 2;
    };
    std::vector<float>& lse = statistics_.emplace_back();
    for (std::int64_t head = 0; head < p.heads_q; ++head)
      lse.insert(lse.end(), all.lse + head * part_rows + block.q_begin, all.lse + head * part_rows + block.q_end);
    Buffers b;
    b.q = at(all.q, of_q), b.k = at(all.k, of_kv), b.v = at(all.v, of_kv), b.out = at(all.out, of_q);
    b.lse = lse.data(), b.dout = at(all.dout, of_q), b.dq = at(all.dq, of_q);
    b.dk = at(all.dk, of_kv), b.dv = at(all.dv, of_kv);
    Options options{.device = parts_device, .kernel = "backward/sm90", .part = part};
    options.workspace_bytes = workspace_bytes(p, Pass::backward, options);
    if (workspace_.empty()) workspace_.assign(options.workspace_bytes + 256, 0xff);  // nobody may rely on a clean one
    ASSERT_EQ(workspace_.size(), options.workspace_bytes + 256) << "the workspace of all parts";
    options.workspace = workspace_.data() + (256 - reinterpret_cast<std::uintptr_t>(workspace_.data()) % 256) % 256;
    backward(p, b, options);
  }

  void run(const std::vector<PartBlock>& blocks) {
    const PartBlock all{0, part_rows, 0, part_rows};
    using Kind = BackwardPart::Kind;
    run({.kind = Kind::rows, .rows = part_rows}, all);
    for (int n = 0; n < static_cast<int>(blocks.size()); ++n) {
      const PartBlock& block = blocks[static_cast<std::size_t>(n)];
      run({.kind = Kind::block, .rows = part_rows, .first = static_cast<int>(block.q_begin), .number = n}, block);
    }
    run({.kind = Kind::dq, .rows = part_rows}, all);
  }

  /// Of dK and dV where every key is in one block.
  void compare_all(bool keys) {
    const Results got = tensors_.read(true);
    const Results &want = expected_.want, &plain = expected_.plain;
    compare("dq", got.dq, want.dq, plain.dq, Dtype::bfloat16);
    if (keys) compare("dk", got.dk, want.dk, plain.dk, Dtype::bfloat16);
    if (keys) compare("dv", got.dv, want.dv, plain.dv, Dtype::bfloat16);
  }

 private:
  Case c_;
  Expected expected_;
  std::unique_ptr<Memory> memory_;
  Tensors tensors_;
  std::vector<unsigned char> workspace_;
  std::vector<std::vector<float>> statistics_;
};

class BackwardSm90Parts : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(BackwardSm90Parts, AreTheWhole) {
  emulator::set_num_sms(3);
  emulator::set_seed(static_cast<std::uint64_t>(GetParam()));
  PartsOfAPass by_keys(parts_case(GetParam()));
  by_keys.run({{0, part_rows, 0, 64}, {64, part_rows, 64, part_rows}});
  by_keys.compare_all(true);
}

TEST_P(BackwardSm90Parts, EndAtATileBeforeOtherRows) {
  emulator::set_num_sms(2);
  emulator::set_seed(3);
  PartsOfAPass by_rows(parts_case(GetParam()));
  by_rows.run({{128, part_rows, 0, part_rows}, {0, 128, 0, 128}});  // in any order
  by_rows.compare_all(false);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, BackwardSm90Parts, ::testing::Values(64, 128));

}  // namespace
}  // namespace flash_attention::testing
