#include <algorithm>
#include <string_view>

#include "support/cases/contract.h"

namespace flash_attention::testing {

std::vector<Case> statistics_cases(Dtype dtype) {
  constexpr std::string_view chosen[] = {
      "plain", "long_keys", "long_queries", "one_by_one", "no_query", "no_key", "head_dim_40", "head_dim_128",
      "head_dim_64_32", "gqa", "mqa_causal", "gaps", "causal_square", "causal_more_queries", "window_top_left",
      "mask_full", "key_lengths", "seqused", "packed_causal", "packed_tail", "scale", "softcap",
      "alibi_per_batch_causal", "bias_infinite", "bias_lowest", "bias_head_keys", "sink", "sink_empty_rows",
      "lse_gradient_sink", "dropout_gqa_causal", "peaked", "growing_causal", "spike", "nan_key", "nan_value",
      "nan_key_seqused", "everything", "softcap_negative_scale", "documents_causal", "hidden_packed_causal",
      "mask_documents", "blocks_by_heads"};
  std::vector<Case> cases;
  for (const std::vector<Case>& all : {contract_cases(dtype), mask_cases(dtype)}) {
    for (Case c : all) {
      if (std::find(std::begin(chosen), std::end(chosen), c.name) == std::end(chosen)) continue;
      c.name = "statistics_" + c.name;
      c.problem.return_max_logit = c.problem.return_key_mass = c.problem.return_entropy = true;
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

}  // namespace flash_attention::testing
