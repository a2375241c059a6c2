#include "api/masks/form.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <initializer_list>
#include <string>

#include "plan/masks.h"
#include "program/program.h"

namespace flash_attention::api {
namespace {

struct FormHash {
  std::uint64_t state;

  void mix(std::uint64_t word) {
    state = (state ^ word) * 0x9E3779B97F4A7C15ull;
    state ^= state >> 29;
  }
  void mix(std::initializer_list<std::int64_t> numbers) {
    for (const std::int64_t number : numbers) mix(static_cast<std::uint64_t>(number));
  }
  void mix(const std::string& text) { mix(static_cast<std::uint64_t>(std::hash<std::string>{}(text))); }
  void mix(const void* pointer) { mix(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pointer))); }
};

/// Finds the tensors and scalars that the program's mask reads.
void find_reads(const std::string& text, MaskForm& form) {
  const auto known = program::parsed(text);
  if (known->visible < 0) return;
  std::vector<int> roots{known->visible};
  const auto add = [](std::vector<int>& to, int n) {
    if (std::find(to.begin(), to.end(), n) == to.end()) to.push_back(n);
  };
  for (const program::Node& node : program::slice(known->nodes, roots)) {
    if (node.op == program::Op::load) add(form.tensors, node.index);
    if (node.op == program::Op::scalar) add(form.scalars, node.index);
  }
}

}  // namespace

MaskForm form_of(const Problem& p, const Plan& plan) {
  MaskForm form;
  if (!plan.mask.present) return form;
  FormHash hash{static_cast<std::uint64_t>(plan.pass)};
  const Launch& launch = plan.launches.front();
  hash.mix(launch.unit + to_source(launch.config));
  hash.mix({launch.grid[0], launch.block, static_cast<std::int64_t>(plan::prepared_bytes(plan))});
  hash.mix({p.batch, p.seq_q, p.seq_kv, p.heads_q, p.heads_kv, p.packed, p.total_q, p.total_kv, p.page_size});
  hash.mix({p.window_left, p.window_right, p.attention_chunk, static_cast<std::int64_t>(p.alignment)});
  hash.mix({p.mask.present, p.mask.batch_stride, p.mask.head_stride, p.mask.q_stride});
  hash.mix({p.hidden_rows.bounds, p.hidden_rows.batch_stride, p.hidden_rows.head_stride});
  const BlockMask& blocks = p.block_mask;
  hash.mix({blocks.block_q, blocks.block_kv, blocks.batch_stride, blocks.head_stride, blocks.q_stride});
  if (!p.program.empty()) {
    hash.mix(p.program);
    find_reads(p.program, form);
    for (const int n : form.tensors) {
      for (const std::int64_t size : p.program_sizes[static_cast<std::size_t>(n)])
        hash.mix(static_cast<std::uint64_t>(size));
    }
  }
  form.hash = hash.state | 1;
  return form;
}

std::uint64_t stamp_of(const MaskForm& form, const Buffers& b) {
  if (form.hash == 0) return 0;
  FormHash hash{form.hash};
  for (const void* pointer :
       {static_cast<const void*>(b.mask), static_cast<const void*>(b.hidden_rows), static_cast<const void*>(b.block_mask),
        static_cast<const void*>(b.cu_seqlens_q), static_cast<const void*>(b.cu_seqlens_kv)})
    hash.mix(pointer);
  for (const int n : form.tensors) hash.mix(b.program_tensors[n]);
  for (const int n : form.scalars) hash.mix(std::bit_cast<std::uint64_t>(b.program_scalars[n]));
  return hash.state | 1;
}

}  // namespace flash_attention::api
