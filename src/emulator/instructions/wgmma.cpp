#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "emulator/instructions/convert.h"
#include "emulator/instructions/table.h"
#include "emulator/instructions/wgmma_product.h"
#include "emulator/machine/address.h"
#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {
namespace {

/// What a thread reads in its accumulator until it has waited: a special NaN.
constexpr std::uint32_t poison = 0x7fe7a5a5;

Warpgroup& warpgroup_of(Thread& thread) { return thread.block->warpgroups[static_cast<std::size_t>(thread.index / 128)]; }

/// Executes the products before `end`, in order.
void execute(Warpgroup& warpgroup, std::uint64_t end) {
  while (warpgroup.executed < end && !warpgroup.ops.empty()) {
    const Wgmma& op = warpgroup.ops.front();
    SharedMemory& shared = warpgroup.block->shared;
    const std::string wrong = multiply(op, shared.async(), shared.size());
    if (!wrong.empty()) Scheduler::current().fail_async(*warpgroup.block, "wgmma", wrong);
    Scheduler::current().counters().wgmma_flops +=
        static_cast<std::uint64_t>(2 * 64 * (is_8_bit(op.shape.type) ? 32 : 16)) * static_cast<std::uint64_t>(op.shape.n);
    warpgroup.ops.pop_front();
    ++warpgroup.executed;
  }
}

bool same_product(const WgmmaOperand& x, const WgmmaOperand& y) {
  return x.n == y.n && x.type == y.type && x.a_mn_major == y.a_mn_major && x.b_mn_major == y.b_mn_major &&
         (x.a_registers == nullptr) == (y.a_registers == nullptr) && x.accumulate == y.accumulate &&
         (x.a_registers != nullptr || x.a_descriptor == y.a_descriptor) && x.b_descriptor == y.b_descriptor;
}

WarpgroupThread::InFlight* find(WarpgroupThread& state, const float* D, int t) {
  for (auto& entry : state.in_flight) {
    if (entry.accumulator->registers[t] == D) return &entry;
  }
  return nullptr;
}

/// Takes the accumulator out of the thread's registers. If the kernel reads them before the wait, it gets poison.
void take_registers(Accumulator& accumulator, const WgmmaOperand& operand, int t) {
  accumulator.registers[t] = operand.D;
  for (int i = 0; i < operand.n / 2; ++i) {
    if (operand.accumulate) {
      accumulator.values[static_cast<std::size_t>(accumulator_row(t, i) * operand.n + accumulator_column(t, i))] =
          operand.D[i];
    }
    operand.D[i] = std::bit_cast<float>(poison);
  }
}

void give_registers(Scheduler& scheduler, const Accumulator& accumulator, int t) {
  float* D = accumulator.registers[t];
  for (int i = 0; i < accumulator.n / 2; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, D + i, 4);
    if (bits != poison)
      scheduler.fail("accumulator register " + std::to_string(i) + " was written while the product was in flight");
    D[i] = accumulator.values[static_cast<std::size_t>(accumulator_row(t, i) * accumulator.n + accumulator_column(t, i))];
  }
}

}  // namespace

void wgmma(const WgmmaOperand& operand) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  thread.doing = "wgmma";
  WarpgroupThread& state = thread.wgmma;
  Warpgroup& warpgroup = warpgroup_of(thread);
  const int t = thread.index % 128;
  if (!state.fenced) scheduler.fail("wgmma_fence is missing before the first product after a wait");
  if (scheduler.shape().block < (thread.index / 128 + 1) * 128) scheduler.fail("the warpgroup has fewer than 128 threads");

  const std::size_t place = static_cast<std::size_t>(state.ops - warpgroup.executed);
  if (place >= warpgroup.ops.size()) {
    warpgroup.ops.emplace_back();
    warpgroup.ops.back().shape = operand;
    if (operand.a_registers != nullptr) warpgroup.ops.back().a_registers.resize(128 * 4);
  }
  Wgmma& op = warpgroup.ops[place];
  if (!same_product(op.shape, operand)) scheduler.fail("the threads of the warpgroup issue different products");

  WarpgroupThread::InFlight* entry = find(state, operand.D, t);
  if (op.accumulator == nullptr) {
    op.accumulator = entry != nullptr ? entry->accumulator : std::make_shared<Accumulator>();
    if (entry == nullptr) {
      op.accumulator->n = operand.n;
      op.accumulator->values.assign(static_cast<std::size_t>(64 * operand.n), 0.0f);
    }
  }
  if (op.accumulator->n != operand.n) scheduler.fail("an accumulator in flight is used with another shape");
  if (entry == nullptr) {
    take_registers(*op.accumulator, operand, t);
    state.in_flight.push_back({op.accumulator, 0});
    entry = &state.in_flight.back();
  } else if (entry->accumulator != op.accumulator) {
    scheduler.fail("the threads of the warpgroup use different accumulators");
  }
  if (operand.a_registers != nullptr) {
    std::copy_n(operand.a_registers, 4, op.a_registers.begin() + t * 4);
    WarpgroupThread::RegisterOperand kept{operand.a_registers, {}, state.ops + 1};
    std::copy_n(operand.a_registers, 4, kept.values);
    state.operands.push_back(kept);
  }
  entry->end = ++state.ops;
  if (thread.block->recorder) {
    thread.block->recorder->add(thread, {.kind = EventKind::wgmma,
                                         .number = static_cast<std::int64_t>(state.ops),
                                         .amount = static_cast<std::uint32_t>(operand.n),
                                         .a_in_shared = operand.a_registers == nullptr});
  }
  if (t % 32 == 0) {
    if (op.known.empty()) op.known = thread.known;
    meet(op.known, thread.known);
  }
  if (++op.deposits < 128) return;
  for_each_operand_chunk(op, [&](std::size_t offset) {
    if (offset + 16 <= thread.block->shared.size())
      scheduler.races().wgmma_reads(thread, op.known, static_cast<std::uint32_t>(state.ops), {thread.block, offset}, 16);
  });
  warpgroup.issued = state.ops;
  scheduler.async().start([&warpgroup, end = state.ops] { execute(warpgroup, end); });
  scheduler.wake_where([&](const Thread& other) {
    return other.wait == Wait::wgmma && other.block == thread.block && other.index / 128 == thread.index / 128;
  });
}

void wgmma_fence() {
  Thread& thread = Scheduler::current().running();
  thread.doing = "wgmma_fence";
  thread.wgmma.fenced = true;
}

void wgmma_commit() {
  Thread& thread = Scheduler::current().running();
  thread.doing = "wgmma_commit";
  thread.wgmma.commits.push_back(thread.wgmma.ops);
  if (thread.block->recorder) thread.block->recorder->add(thread, {.kind = EventKind::wgmma_commit}, true);
}

void wgmma_wait(int pending) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  thread.doing = "wgmma_wait";
  if (thread.block->recorder) {
    thread.block->recorder->add(thread, {.kind = EventKind::wgmma_wait, .amount = static_cast<std::uint32_t>(pending)},
                                true);
  }
  WarpgroupThread& state = thread.wgmma;
  Warpgroup& warpgroup = warpgroup_of(thread);
  state.fenced = false;
  const std::size_t committed = state.commits.size();
  if (committed <= static_cast<std::size_t>(pending)) return;
  const std::uint64_t end = state.commits[committed - 1 - static_cast<std::size_t>(pending)];
  while (warpgroup.issued < end) scheduler.suspend(Wait::wgmma, 0);
  execute(warpgroup, end);
  scheduler.races().finish_wgmma(thread, static_cast<std::uint32_t>(end));
  const int t = thread.index % 128;
  for (const auto& operand : state.operands) {
    if (operand.end > end) continue;
    if (!std::equal(operand.values, operand.values + 4, operand.registers)) {
      scheduler.fail("registers of operand A were written while the product was in flight");
    }
  }
  std::erase_if(state.operands, [&](const auto& operand) { return operand.end <= end; });
  for (const auto& entry : state.in_flight) {
    if (entry.end <= end) give_registers(scheduler, *entry.accumulator, t);
  }
  std::erase_if(state.in_flight, [&](const auto& entry) { return entry.end <= end; });
  state.commits.erase(state.commits.begin(), state.commits.end() - pending);
}

}  // namespace flash_attention::emulator
