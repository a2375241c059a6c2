#include "support/oracle/pages.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace flash_attention::testing {

void put_in_pages(Case& c, std::int64_t page_size, std::vector<std::int32_t> lengths) {
  Problem& p = c.problem;
  p.batch = static_cast<std::int64_t>(lengths.size());
  p.seqused_kv = true;
  p.page_size = page_size;
  const auto pages_of = [&](std::int64_t keys) { return (keys + page_size - 1) / page_size; };
  p.page_table_stride = pages_of(p.seq_kv) + 3;
  std::vector<std::int32_t> order;  // two pages belong to nobody
  for (std::int32_t length : lengths) order.resize(order.size() + pages_of(length));
  order.resize(order.size() + 2);
  p.num_pages = static_cast<std::int64_t>(order.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(c.seed));
  auto next = order.begin();
  for (std::int32_t length : lengths) {
    for (std::int64_t page = 0; page < p.page_table_stride; ++page) {
      const std::int32_t garbage[] = {-1, 0x7fffffff, static_cast<std::int32_t>(p.num_pages), -0x7fffffff};
      c.page_table.push_back(page < pages_of(length) ? *next++ : garbage[page % 4]);
    }
  }
  c.seqused_kv = std::move(lengths);
}

}  // namespace flash_attention::testing
