// Runs one kernel of the ladder, one thread at a time, and records the operations of each thread: copies, products, waits,
// arrivals. tools/draw_lessons.py compiles it against the emulator's headers, so the pictures are drawn from the kernel's
// own source:
//
//   c++ -std=c++20 -I src/emulator/runtime -I kernels -DRUNG='"ladder/13_warp_specialised.cu"'
//   -DCONFIG='ForwardConfig{...}'
//   ./recorder SHARED_BYTES THREADS GRID SEQUENCE HEADS BLOCK THREAD...
//
// Nothing waits here and no value is right: the order of the steps does not depend on values. A line is a thread's step.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// After the standard headers, which the macros of the prelude would change.
// clang-format off
#include "prelude.h"
#include RUNG
// clang-format on

namespace emulator = flash_attention::emulator;
using namespace flash_attention;
using namespace flash_attention::abi;

namespace {

emulator::ThreadView view{};
emulator::Arithmetic arithmetic{};
unsigned long written = 0;  // of its FLOPs
std::vector<unsigned char> shared;
AttentionArgs args{};
unsigned char zeros[1 << 16] __attribute__((aligned(256)));

/// A step, after the arithmetic since the one before.
template <typename... Values>
void step(const char* form, Values... values) {
  const unsigned long flops = arithmetic.fma_flops - written;
  if (flops >= 2) std::printf("%u arithmetic %lu\n", view.thread.x, flops / 2);
  written = arithmetic.fma_flops;
  std::printf("%u ", view.thread.x);
  std::printf(form, values...);
  std::putchar('\n');
}

unsigned address_of(const void* pointer) {
  return emulator::shared_window + static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - view.shared);
}

/// What the lanes of a warp do together, as if this lane were alone and all others held the same.
void warp(emulator::WarpOp op, void* operand) {
  using enum emulator::WarpOp;
  if (op == vote) {
    auto& its = *static_cast<emulator::VoteOperand*>(operand);
    its.lanes = its.predicate ? ~0u : 0;
  } else if (op == elect) {
    static_cast<emulator::VoteOperand*>(operand)->predicate = view.lane == 0;
  } else if (op == ldmatrix) {
    const auto& its = *static_cast<const emulator::MatrixMoveOperand*>(operand);
    std::memset(its.tiles, 0, 4 * its.count);
    step("ldmatrix %u %d", its.row, its.transposed);
  } else if (op == mma) {
    step("mma");
  }
}

unsigned char* access_shared(emulator::Access access, unsigned address, int bytes, const void* value) {
  unsigned char* const place = view.shared + (address - emulator::shared_window);
  if (value != nullptr) std::memcpy(place, value, bytes);
  step(access == emulator::Access::load_shared ? "load_shared %u %d" : "store_shared %u %d", address, bytes);
  return place;
}

void bulk(const char* what, const emulator::BulkOperand& its) {
  const long map = its.map == nullptr ? -1 : static_cast<const TensorMap*>(its.map) - args.maps;
  step("%s %ld %u %u %d %d %d", what, map, its.shared, its.barrier, its.coordinates[0], its.coordinates[1],
       its.coordinates[2]);
}

const emulator::Table recording = {
    .warp = warp,
    .barrier = [](int id, int threads, bool wait) { step("barrier %d %d %d", id, threads, wait); },
    .cluster_barrier = [](bool) {},
    .access_global =
        [](emulator::Access access, const void*, int) {
          if (access == emulator::Access::load_global) step("load_global");
        },
    .access_shared = access_shared,
    .shared_address = address_of,
    .spin = [] {},
    .fail =
        [](const char* what) {
          std::fprintf(stderr, "%s\n", what);
          std::exit(1);
        },
    .copy_async = [](unsigned to, const void*, int, int) { step("copy_async %u", to); },
    .copy_async_commit = [] { step("copy_async_commit"); },
    .copy_async_wait = [](int pending) { step("copy_async_wait %d", pending); },
    .mbarrier_init = [](unsigned address, int arrivals) { step("mbarrier_init %u %d", address, arrivals); },
    .mbarrier_arrive = [](unsigned address, int, int bytes) { step("mbarrier_arrive %u %d", address, bytes); },
    .mbarrier_init_fence = [] {},
    .mbarrier_test = [](unsigned, unsigned) { return true; },
    .mbarrier_wait = [](unsigned address, unsigned parity) { step("mbarrier_wait %u %u", address, parity); },
    .bulk_load = [](const emulator::BulkOperand& its) { bulk("bulk_load", its); },
    .bulk_store = [](const emulator::BulkOperand& its) { bulk("bulk_store", its); },
    .bulk_commit = [] {},
    .bulk_wait = [](int, bool) {},
    .fence_proxy_async = [] {},
    .store_async = [](unsigned, const void*, int, unsigned) {},
    .wgmma = [](const emulator::WgmmaOperand& its) { step("wgmma %d", its.a_registers != nullptr); },
    .wgmma_fence = [] {},
    .wgmma_commit = [] { step("wgmma_commit"); },
    .wgmma_wait = [](int pending) { step("wgmma_wait %d", pending); },
    .set_registers = [](int count, bool) { step("registers %d", count); },
    .path = [](const char*) {},
    .griddepcontrol_wait = [] {},
};

}  // namespace

int main(int count, char** words) {
  const auto number = [&](int word) { return word < count ? std::atoi(words[word]) : 0; };
  const unsigned threads = number(2), grid = number(3);
  const int sequence = number(4), heads = number(5);
  shared.resize(number(1) + 2048);
  view.shared = shared.data() + (1024 - reinterpret_cast<unsigned long>(shared.data()) % 1024) % 1024;
  view.shared_bytes = number(1);
  view.block = {static_cast<unsigned>(number(6)), 0, 0};
  view.block_dim = {threads, 1, 1}, view.grid_dim = {grid, 1, 1};
  view.cluster_size = 1, view.arithmetic = &arithmetic;
  // Rows of stride 0: every one is the same zeros.
  for (TensorView* tensor : {&args.Q, &args.K, &args.V, &args.O}) tensor->data = zeros;
  args.batch = args.group = 1, args.heads_q = args.heads_kv = heads, args.scale = 1;
  args.seq_q = args.seq_kv = sequence, args.total_q = args.total_kv = sequence;
  emulator::table = &recording, emulator::thread = &view;
  for (int word = 7; word < count; ++word) {
    view.thread = {static_cast<unsigned>(number(word)), 0, 0}, view.lane = view.thread.x % 32;
    attention<CONFIG>(args);
    step("end");
  }
}
