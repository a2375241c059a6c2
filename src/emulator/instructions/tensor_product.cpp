#include "emulator/instructions/tensor_product.h"

#include <string>

#include "emulator/instructions/mbarrier.h"
#include "emulator/instructions/table.h"
#include "emulator/machine/address.h"
#include "emulator/machine/scheduler.h"

// tcgen05.mma and tcgen05.commit. A product is executed at some time between its issue and the arrival that a commit of its
// thread brings about; products of the same accumulator and shape in order, others in any order.

namespace flash_attention::emulator {
namespace {

/// The product of that number, and those before it that the hardware executes first.
void execute(Block& block, std::size_t number) {
  TensorMemory& tensor = block.tensor;
  if (tensor.products[number - 1].done) return;
  const AccumulatorKey key = tensor.products[number - 1].key;
  for (std::size_t i = tensor.first_open; i < number; ++i) {
    TensorProduct& product = tensor.products[i];
    if (product.done || product.key != key) continue;
    product.done = true;
    const std::string wrong = multiply(product.operand, tensor, block.shared.async(), block.shared.size());
    if (!wrong.empty()) return Scheduler::current().fail_async(block, "tcgen05_mma", wrong);
  }
  while (tensor.first_open < tensor.products.size() && tensor.products[tensor.first_open].done) ++tensor.first_open;
}

}  // namespace

void tensor_product(const TensorProductOperand& operand) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  Block& block = *thread.block;
  TensorMemory& tensor = block.tensor;
  thread.doing = "tcgen05_mma";
  if (!tensor.exists()) scheduler.fail("the block has allocated no tensor memory");
  if (tensor.issuer >= 0 && tensor.issuer != thread.index) {
    scheduler.fail("thread " + std::to_string(tensor.issuer) +
                   " has issued products of this block; the emulator follows one "
                   "thread that does");
  }
  tensor.issuer = thread.index;
  const ProductShape shape(operand.shape);
  if (const std::string wrong = shape.reject(); !wrong.empty()) scheduler.fail(wrong);
  const TensorPlace D(operand.D), A(operand.a_address);
  const auto n = static_cast<unsigned>(shape.n);
  if (D.lane != 0 || !tensor.holds(D.column, n))
    scheduler.fail("D, " + std::to_string(n) + " columns from " + std::to_string(D.column) + " on, is not allocated");
  if (operand.a_in_tensor_memory && (A.lane != 0 || !tensor.holds(A.column, 8)))
    scheduler.fail("A, 8 columns from " + std::to_string(A.column) + " on, is not allocated");

  const std::uint32_t number = tensor.order.next_product();
  const AccumulatorKey key = AccumulatorKey{D.column} << 16 | n;
  std::string wrong = operand.a_in_tensor_memory ? tensor.order.multiply(thread, A.column, 8) : std::string();
  if (wrong.empty()) wrong = tensor.order.accumulate(thread, D.column, n, key, operand.accumulate);
  if (!wrong.empty()) scheduler.fail(wrong);
  for_each_operand_chunk(operand, shape, [&](std::size_t offset) {
    if (offset + 16 > block.shared.size()) return;  // multiply() says so
    scheduler.races().tensor_product_reads(thread, tensor.order.product_actor(), number, {&block, offset}, 16);
  });
  scheduler.counters().tcgen05_flops += 2ull * 128 * 16 * n;
  tensor.products.push_back({operand, key});
  scheduler.async().start([&block, number] { execute(block, number); });
}

void tensor_commit(unsigned barrier) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  thread.doing = "tcgen05_commit";
  Block& block = *thread.block;
  const SharedPlace place = locate(barrier, 8, 8);
  require_visible_mbarrier(place);
  scheduler.races().read(thread, place, 8);  // it has been initialised
  TensorMemory& tensor = block.tensor;
  const std::size_t count = tensor.issuer == thread.index ? tensor.products.size() : 0;
  Clocks known = scheduler.races().known_loads(thread);
  const std::uint32_t actor = tensor.order.product_actor();
  if (count > 0) {
    if (known.size() <= actor) known.resize(actor + 1);
    known[actor] = static_cast<std::uint32_t>(count);
  }
  scheduler.async().start_signalling([&block, &scheduler, place, count, known = std::move(known)] {
    // Chains of one accumulator each, in any order.
    std::vector<std::size_t> open;
    for (std::size_t i = block.tensor.first_open + 1; i <= count; ++i) {
      if (!block.tensor.products[i - 1].done) open.push_back(i);
    }
    while (!open.empty()) {
      const std::size_t chosen = scheduler.random().below(static_cast<std::uint32_t>(open.size()));
      execute(block, open[chosen]);
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(chosen));
    }
    mbarrier_arrive_later(place, known, "tcgen05_commit");
  });
}

}  // namespace flash_attention::emulator
