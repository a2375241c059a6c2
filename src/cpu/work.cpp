#include "cpu/work.h"

#include <algorithm>

namespace flash_attention::cpu {

double multiplications(const Problem& problem, Pass pass) {
  // A single row takes the time of four rows, and a few keys that of eight keys.
  const auto rows = static_cast<double>(std::max<std::int64_t>(problem.heads_q * problem.seq_q, 4 * problem.heads_kv));
  const std::int64_t listed = problem.key_list.entries * problem.key_list.block_kv;
  const std::int64_t seen = problem.key_list.kind == KeyListKind::none ? problem.seq_kv : listed;
  const auto keys = static_cast<double>(std::max<std::int64_t>(seen, 8));
  const double scores = static_cast<double>(problem.batch) * rows * keys;
  double products = 1;  // two
  if (pass == Pass::backward || pass == Pass::standard_backward) products = 2.5;
  if (pass == Pass::tangent) products = 3;
  if (pass == Pass::second) products = 8;
  return products * scores * static_cast<double>(problem.head_dim + problem.head_dim_v);
}

}  // namespace flash_attention::cpu
