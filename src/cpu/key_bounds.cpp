#include "cpu/key_bounds.h"

#include <algorithm>

#include "cpu/region.h"
#include "plan/key_bounds.h"

namespace flash_attention::cpu {

void find_key_bounds(const Call& call) {
  if (call.hidden_rows == nullptr) return;
  const bool packed = call.cu_seqlens_kv != nullptr;
  const std::int64_t heads = call.hidden_head_stride != 0 ? call.heads_kv : 1;
  const std::int64_t places = abi::unit_places(packed, call.batch, call.seq_kv, call.total_kv);
  auto* units = region<abi::KeyBounds>(call, plan::CpuRegion::masks);
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t batch = 0; batch < call.batch; ++batch) {
      const std::int64_t first = packed ? call.cu_seqlens_kv[batch] : 0;
      const std::int64_t keys = packed ? call.cu_seqlens_kv[batch + 1] - first : call.seq_kv;
      const std::int32_t* rows =
          call.hidden_rows + batch * call.hidden_batch_stride + head * call.hidden_head_stride + first * call.hidden_bounds;
      abi::KeyBounds* to = units + head * places + abi::unit_place(packed, batch, call.seq_kv, first);
      for (std::int64_t begin = 0; begin < keys; begin += abi::mask_unit, ++to) {
        *to = abi::no_bounds();
        const std::int64_t end = std::min<std::int64_t>(begin + abi::mask_unit, keys);
        for (std::int64_t key = begin; key < end; ++key) {
          abi::take_key(*to, rows + key * call.hidden_bounds, call.hidden_bounds);
        }
      }
    }
  }
}

}  // namespace flash_attention::cpu
