#include "api/guard.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace flash_attention::api {
namespace {

template <class Thrown>
ErrorCode code_of(const Thrown& thrown) {
  try {
    guarded([&] { throw thrown; });
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()), "");
    return error.code();
  } catch (...) {
    ADD_FAILURE() << "another exception left";
  }
  return ErrorCode{};
}

TEST(Guard, ErrorIsTheOnlyExceptionThatLeaves) {
  EXPECT_EQ(code_of(Error(ErrorCode::unsupported, "no")), ErrorCode::unsupported);
  EXPECT_EQ(code_of(std::bad_alloc()), ErrorCode::out_of_memory);
  EXPECT_EQ(code_of(std::filesystem::filesystem_error("cannot look", "/x", std::make_error_code(std::errc::io_error))),
            ErrorCode::unavailable);
  EXPECT_EQ(code_of(std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again))),
            ErrorCode::unavailable);
  EXPECT_EQ(code_of(std::length_error("too long")), ErrorCode::internal);
  EXPECT_EQ(code_of(std::out_of_range("out")), ErrorCode::internal);
}

TEST(Guard, ResultsPassThrough) {
  EXPECT_EQ(guarded([] { return std::vector<int>{1, 2}; }), (std::vector<int>{1, 2}));
  int called = 0;
  guarded([&] { ++called; });
  EXPECT_EQ(called, 1);
}

}  // namespace
}  // namespace flash_attention::api
