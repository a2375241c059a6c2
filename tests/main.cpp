#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>

// main of every test program: GoogleTest's own, and --file=ROOM/NAME_test.cpp, which takes the tests of one file.

namespace {

/// A filter that takes the suites with a test in the file; one that takes none where there is no such file.
std::string suites_of(std::string_view file) {
  const std::string ending = "/" + std::string(file);
  std::set<std::string> suites;
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      if (std::string_view(suite.GetTestInfo(t)->file()).ends_with(ending)) suites.insert(suite.name());
    }
  }
  std::string filter;
  for (const std::string& suite : suites) filter += suite + ".*:";
  return filter.empty() ? "-*" : filter;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--file=")) ::testing::GTEST_FLAG(filter) = suites_of(argument.substr(7));
  }
  return RUN_ALL_TESTS();
}
