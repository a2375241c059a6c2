#include "support/log.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "flash_attention/runtime.h"

namespace flash_attention::support {
namespace {

TEST(Log, goes_to_the_callback_and_nowhere_else) {
  std::vector<std::string> heard;
  log("before there is one");
  set_log_callback([](std::string_view message,
                      void* context) { static_cast<std::vector<std::string>*>(context)->emplace_back(message); },
                   &heard);
  log("one");
  log("two");
  set_log_callback(nullptr, nullptr);
  log("after");
  EXPECT_EQ(heard, (std::vector<std::string>{"one", "two"}));
}

TEST(Log, the_callback_may_log) {
  static int depth = 0;
  set_log_callback(
      [](std::string_view, void*) {
        if (depth++ == 0) log("inner");
      },
      nullptr);
  log("outer");
  set_log_callback(nullptr, nullptr);
  EXPECT_EQ(depth, 2);
}

}  // namespace
}  // namespace flash_attention::support
