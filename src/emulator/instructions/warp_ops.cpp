#include "emulator/instructions/warp_ops.h"

#include <string>

#include "emulator/instructions/matrix_ops.h"
#include "emulator/instructions/tensor_memory.h"
#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {
namespace {

/// The lane that `lane` reads. There may be no lane with that number.
int source_lane(const ShuffleOperand& operand, int lane) {
  const int number = operand.lane & 31;
  switch (operand.mode) {
    case ShuffleMode::exclusive_or:
      return lane ^ number;
    case ShuffleMode::index:
      return number;
    case ShuffleMode::up:
      return lane - number;
  }
  return lane;
}

void shuffle(void* const* operands, int lanes) {
  unsigned results[32];
  for (int lane = 0; lane < lanes; ++lane) {
    const auto& operand = *static_cast<ShuffleOperand*>(operands[lane]);
    const int source = source_lane(operand, lane);
    const bool exists = source >= 0 && source < lanes;
    results[lane] = static_cast<ShuffleOperand*>(operands[exists ? source : lane])->value;
  }
  for (int lane = 0; lane < lanes; ++lane) static_cast<ShuffleOperand*>(operands[lane])->value = results[lane];
}

void vote(void* const* operands, int lanes) {
  unsigned ballot = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    if (static_cast<VoteOperand*>(operands[lane])->predicate) ballot |= 1u << lane;
  }
  for (int lane = 0; lane < lanes; ++lane) static_cast<VoteOperand*>(operands[lane])->lanes = ballot;
}

void elect(void* const* operands, int lanes) {
  const int chosen = static_cast<int>(Scheduler::current().random().below(static_cast<std::uint32_t>(lanes)));
  for (int lane = 0; lane < lanes; ++lane) static_cast<VoteOperand*>(operands[lane])->predicate = lane == chosen;
}

void perform(WarpOp op, void* const* operands, int lanes) {
  if (op >= WarpOp::ldmatrix && lanes != 32) Scheduler::current().fail("needs a full warp of 32 threads");
  switch (op) {
    case WarpOp::sync:
      break;
    case WarpOp::shuffle:
      shuffle(operands, lanes);
      break;
    case WarpOp::vote:
      vote(operands, lanes);
      break;
    case WarpOp::elect:
      elect(operands, lanes);
      break;
    case WarpOp::ldmatrix:
      ldmatrix(operands);
      break;
    case WarpOp::stmatrix:
      stmatrix(operands);
      break;
    case WarpOp::mma:
      mma(operands);
      break;
    case WarpOp::wmma_load:
      wmma_load(operands);
      break;
    case WarpOp::wmma_multiply:
      wmma_multiply(operands);
      break;
    case WarpOp::wmma_store:
      wmma_store(operands);
      break;
    case WarpOp::tmem_alloc:
      tmem_alloc(operands);
      break;
    case WarpOp::tmem_relinquish:
      tmem_relinquish();
      break;
    case WarpOp::tmem_dealloc:
      tmem_dealloc(operands);
      break;
    case WarpOp::tmem_load:
      tmem_load(operands);
      break;
    case WarpOp::tmem_store:
      tmem_store(operands);
      break;
    case WarpOp::tmem_wait_load:
      tmem_wait_load();
      break;
    case WarpOp::tmem_wait_store:
      tmem_wait_store();
      break;
  }
}

/// Counts what the warp did together, for the lane that arrived last.
void record(Recorder& recorder, const Thread& thread, WarpOp op, const void* operand) {
  recorder.meet(thread);
  Work& work = recorder.work(thread);
  constexpr std::uint64_t tile_bytes = 128, fragment_bytes = 512;
  switch (op) {
    case WarpOp::ldmatrix:
    case WarpOp::stmatrix: {
      const auto tiles = static_cast<std::uint64_t>(static_cast<const MatrixMoveOperand*>(operand)->count);
      work.shared_bytes += tiles * tile_bytes, ++work.warp_instructions;
      break;
    }
    case WarpOp::mma: {
      const MatrixType type = static_cast<const MultiplyOperand*>(operand)->type;
      const int k = type == MatrixType::tf32 ? 8 : type == MatrixType::e4m3 || type == MatrixType::e5m2 ? 32 : 16;
      work.mma_flops += static_cast<std::uint64_t>(2 * 16 * 8 * k), ++work.warp_instructions;
      break;
    }
    case WarpOp::wmma_load:
    case WarpOp::wmma_store:
      work.shared_bytes += fragment_bytes, ++work.warp_instructions;
      break;
    case WarpOp::wmma_multiply:
      work.mma_flops += 2 * 16 * 16 * 16, work.warp_instructions += 2;
      break;
    case WarpOp::shuffle:
    case WarpOp::vote:
    case WarpOp::elect:
    case WarpOp::tmem_alloc:
    case WarpOp::tmem_relinquish:
    case WarpOp::tmem_dealloc:
    case WarpOp::tmem_load:
    case WarpOp::tmem_store:
    case WarpOp::tmem_wait_load:
    case WarpOp::tmem_wait_store:
      ++work.warp_instructions;  // what tensor memory takes has no rate yet
      break;
    case WarpOp::sync:
      break;
  }
}

}  // namespace

const char* name_of(WarpOp op) {
  switch (op) {
    case WarpOp::sync:
      return "__syncwarp";
    case WarpOp::shuffle:
      return "shuffle";
    case WarpOp::vote:
      return "ballot";
    case WarpOp::elect:
      return "elect";
    case WarpOp::ldmatrix:
      return "ldmatrix";
    case WarpOp::stmatrix:
      return "stmatrix";
    case WarpOp::mma:
      return "mma";
    case WarpOp::wmma_load:
      return "wmma_load";
    case WarpOp::wmma_multiply:
      return "wmma_multiply";
    case WarpOp::wmma_store:
      return "wmma_store";
    case WarpOp::tmem_alloc:
      return "tmem_alloc";
    case WarpOp::tmem_relinquish:
      return "tmem_relinquish";
    case WarpOp::tmem_dealloc:
      return "tmem_dealloc";
    case WarpOp::tmem_load:
      return "tmem_load";
    case WarpOp::tmem_store:
      return "tmem_store";
    case WarpOp::tmem_wait_load:
      return "tmem_wait_load";
    case WarpOp::tmem_wait_store:
      return "tmem_wait_store";
  }
  return "?";
}

void warp_op(WarpOp op, void* operand) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  Warp& warp = *thread.warp;
  thread.doing = name_of(op);
  thread.accesses.next_epoch();
  if (warp.arrived == 0) {
    warp.op = op;
  } else if (warp.op != op) {
    scheduler.fail(std::string("the lanes of the warp have parted: others are in ") + name_of(warp.op));
  }
  warp.operands[thread.view.lane] = operand;
  const int lanes = static_cast<int>(warp.lanes.size());
  if (++warp.arrived < lanes) return scheduler.suspend(Wait::warp, 0);
  perform(op, warp.operands, lanes);
  if (op == WarpOp::sync) scheduler.races().sync(warp);
  if (thread.block->recorder) record(*thread.block->recorder, thread, op, operand);
  warp.arrived = 0;
  for (Thread* lane : warp.lanes) {
    if (lane != &thread) scheduler.wake(*lane);
  }
}

}  // namespace flash_attention::emulator
