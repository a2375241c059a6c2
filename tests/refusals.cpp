// Records each Error that a test program throws: FLASH_ATTENTION_RECORD_REFUSALS names the file that lines are added to, of
// test, code and sentence. tools/record_refusals.py sets it and compares two records.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <typeinfo>

#include "flash_attention/error.h"

namespace {

void record(const flash_attention::Error& error) {
  static const char* const path = std::getenv("FLASH_ATTENTION_RECORD_REFUSALS");
  const ::testing::TestInfo* const test = ::testing::UnitTest::GetInstance()->current_test_info();
  if (path == nullptr || test == nullptr) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::string sentence = error.what();
  for (char& c : sentence) c = c == '\n' ? ' ' : c;
  std::ofstream(path, std::ios::app) << test->test_suite_name() << '.' << test->name() << '\t'
                                     << static_cast<int>(error.code()) << '\t' << sentence << '\n';
}

}  // namespace

// The linker sends each `throw` of the program here (--wrap of tests/CMakeLists.txt).
extern "C" [[noreturn]] void __real___cxa_throw(void* thrown, std::type_info* type, void (*destroy)(void*));
extern "C" [[noreturn]] void __wrap___cxa_throw(void* thrown, std::type_info* type, void (*destroy)(void*)) {
  if (*type == typeid(flash_attention::Error)) record(*static_cast<const flash_attention::Error*>(thrown));
  __real___cxa_throw(thrown, type, destroy);
}
