#pragma once

#include <cstdint>
#include <vector>

#include "support/oracle/case.h"

namespace flash_attention::testing {

/// Puts K and V of a case into pages, in no order: one sequence for each length, all at most seq_kv. Among the entries past
/// a length are -1 and what could be no page.
void put_in_pages(Case& c, std::int64_t page_size, std::vector<std::int32_t> lengths);

}  // namespace flash_attention::testing
