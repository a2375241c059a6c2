#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "api/plain_kernel.h"

namespace flash_attention::testing {

/// One kernel of the primer at one size. Vectors have rows * columns elements.
struct PrimerCase {
  std::string unit, entry;
  int rows, columns;
  PlainLaunch launch;
};

inline std::vector<PrimerCase> primer_cases() {
  const auto ceil_div = [](int a, int b) { return static_cast<unsigned>((a + b - 1) / b); };
  std::vector<PrimerCase> cases;
  for (const auto& [rows, columns] : {std::pair{1, 1}, {1, 3}, {5, 7}, {8, 32}, {33, 65}, {257, 31}}) {
    const int n = rows * columns;
    cases.push_back({"primer/vector_add_simple", "vector_add_simple", rows, columns, {{ceil_div(n, 64), 1}, {64, 1}}});
    // Fewer threads than groups of four: the loop goes round; and more: most have nothing to do.
    cases.push_back({"primer/vector_add", "vector_add", rows, columns, {{2, 1}, {64, 1}}});
    cases.push_back({"primer/vector_add", "vector_add", rows, columns, {{ceil_div(n, 64), 1}, {64, 1}}});
    const PlainLaunch by_rows{{ceil_div(columns, 32), ceil_div(rows, 8)}, {32, 8}};
    const PlainLaunch by_columns{{ceil_div(rows, 16), ceil_div(columns, 4)}, {16, 4}};
    cases.push_back({"primer/matrix_add", "matrix_add", rows, columns, by_rows});
    cases.push_back({"primer/matrix_add", "matrix_add_by_columns", rows, columns, by_columns});
  }
  return cases;
}

/// Host and device memory of a case; elements beyond the last one must stay as they are.
struct PrimerData {
  static constexpr std::size_t margin = 64;
  static constexpr float untouched = -1000;
  std::vector<float> a, b, c;

  explicit PrimerData(const PrimerCase& primer) {
    const std::size_t n = static_cast<std::size_t>(primer.rows) * static_cast<std::size_t>(primer.columns) + margin;
    for (std::size_t i = 0; i < n; ++i) {
      a.push_back(0.1f * static_cast<float>(i % 1009));
      b.push_back(3.7f / static_cast<float>(i + 1));
    }
    c.assign(n, untouched);
  }

  void launch(const PlainKernel& kernel, const PrimerCase& primer, void* a_device, void* b_device, void* c_device) const {
    int rows = primer.rows, columns = primer.columns;
    long long n = static_cast<long long>(rows) * columns;
    void* vector[] = {&a_device, &b_device, &c_device, &n};
    void* matrix[] = {&a_device, &b_device, &c_device, &rows, &columns};
    kernel.launch(primer.launch, primer.unit == "primer/matrix_add" ? matrix : vector, nullptr);
  }

  void expect_sums() const {
    for (std::size_t i = 0; i < c.size(); ++i) {
      ASSERT_EQ(c[i], i < c.size() - margin ? a[i] + b[i] : untouched) << "element " << i << " of " << c.size() - margin;
    }
  }
};

}  // namespace flash_attention::testing
