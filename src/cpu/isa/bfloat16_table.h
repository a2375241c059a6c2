#pragma once

// The kernels in bfloat16 over one instruction set's products of pairs.

#include "cpu/backward/backward_bfloat16.h"
#include "cpu/prefill/bfloat16.h"

namespace flash_attention::cpu {
namespace {

template <class Products>
constexpr KernelTable make_bfloat16_table() {
  KernelTable table{};
  table.prefill[0] = {pack_ahead_items, pack_ahead};
  table.prefill[1] = {forward_items, forward_bfloat16<Products>};
  table.prefill[2] = {merge_items, merge};
  table.backward[0] = {pack_items, pack_backward};
  table.backward[1] = {backward_items, backward_bfloat16<Products>};
  table.backward[2] = {finish_backward_items, finish_backward};
  table.backward[3] = {merge_dq_items, merge_dq};
  table.backward[4] = {sink_items, finish_sink};
  table.scratch_bytes = larger(sizeof(Bfloat16Scratch), larger(sizeof(Bfloat16BackwardScratch), sizeof(BackwardScratch)));
  table.block_q = block_q;
  return table;
}

}  // namespace
}  // namespace flash_attention::cpu
