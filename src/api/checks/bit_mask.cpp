#include "api/checks/bit_mask.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "api/checks/refuse.h"
#include "api/checks/sizes.h"

namespace flash_attention::api {

void check_bit_mask(Problem& p, Pass pass) {
  const bool forward = pass == Pass::forward, lists = p.key_list.kind != KeyListKind::none;
  require(forward || !p.sequence_windows, "sequence_windows", std::int64_t{1}, "only forward takes them");
  require(!lists || !p.sequence_windows, "sequence_windows", std::int64_t{1},
          "they are not combined with lists of keys yet");
  BitMask& mask = p.bit_mask;
  require(mask.kind <= BitMaskKind::drafts, "bit_mask.kind", static_cast<std::int64_t>(mask.kind),
          "allowed are none, keys and drafts");
  if (mask.kind == BitMaskKind::none) {
    mask = {};
    return;
  }
  const std::string got = "bits of " + std::string(to_string(mask.kind));
  if (!forward) refuse("bit_mask", got, "only forward takes them");
  if (lists) refuse("bit_mask", got, "they are not combined with lists of keys yet");
  if (mask.kind == BitMaskKind::keys) {
    require(mask.offsets, "bit_mask.offsets", std::int64_t{0}, "bits of keys need them");
    require(mask.row_bytes == 0, "bit_mask.row_bytes", mask.row_bytes, "it belongs to bits of drafts");
    return;
  }
  check_size("bit_mask.row_bytes", mask.row_bytes, 1);
  const std::int64_t reach = std::max<std::int64_t>(p.packed ? p.total_q : p.seq_q, 1);  // of one sequence at most
  if (mask.row_bytes > std::numeric_limits<std::int32_t>::max() / reach) {
    refuse("bit_mask.row_bytes", std::to_string(mask.row_bytes), "the bits of a sequence must fit in 2^31 bytes");
  }
  if (!p.packed && 8 * mask.row_bytes < p.seq_q) {
    refuse("bit_mask.row_bytes", std::to_string(mask.row_bytes),
           std::to_string(p.seq_q) + " queries need " + std::to_string((p.seq_q + 7) / 8) + " bytes a row");
  }
}

void check_bit_mask_offsets(const Problem& p, const Buffers& b) {
  if (!p.bit_mask.offsets || b.bit_mask_offsets == nullptr) return;
  for (std::int64_t i = 0; i <= p.batch; ++i) {
    const std::int32_t before = i == 0 ? 0 : b.bit_mask_offsets[i - 1];
    if (b.bit_mask_offsets[i] >= before) continue;
    refuse("bit_mask_offsets[" + std::to_string(i) + "]", std::to_string(b.bit_mask_offsets[i]),
           "it must not be less than " + std::to_string(before));
  }
}

}  // namespace flash_attention::api
