// What is refused about bit masks and windows of sequences, by name.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "api/checks/visibility.h"
#include "api/checks/validate.h"
#include "flash_attention/error.h"

namespace flash_attention::testing {
namespace {

Problem with_drafts() {
  return {.batch = 2, .seq_q = 12, .seq_kv = 50, .heads_q = 8, .heads_kv = 2, .head_dim = 16,
          .bit_mask = {.kind = BitMaskKind::drafts, .row_bytes = 2}};
}

void expect_refused(const char* argument, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << argument << " was not refused";
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with(argument)) << error.what();
  }
}

void expect_bits_refused(const char* argument, const std::function<void(Problem&)>& change, Pass pass = Pass::forward) {
  Problem p = with_drafts();
  change(p);
  expect_refused(argument, [&] { api::normalise(p, pass); });
}

TEST(BitMaskChecks, TakesWhatIsOne) {
  Problem p = with_drafts();
  EXPECT_NO_THROW(api::normalise(p, Pass::forward));
  p.bit_mask = {.kind = BitMaskKind::keys, .offsets = true};
  p.invariant = p.sequence_windows = true;
  EXPECT_NO_THROW(api::normalise(p, Pass::forward));
  p.bit_mask = {.row_bytes = 7, .offsets = true};  // off: the rest says nothing
  EXPECT_EQ(api::normalise(p, Pass::forward).bit_mask, BitMask{});
}

TEST(BitMaskChecks, RefusesWhatIsNone) {
  expect_bits_refused("bit_mask.row_bytes", [](Problem& p) { p.bit_mask.row_bytes = 0; });
  expect_bits_refused("bit_mask.row_bytes", [](Problem& p) { p.bit_mask.row_bytes = 1; });  // 12 queries
  expect_bits_refused("bit_mask.row_bytes", [](Problem& p) { p.bit_mask.row_bytes = 1 << 30; });
  expect_bits_refused("bit_mask.offsets", [](Problem& p) { p.bit_mask = {.kind = BitMaskKind::keys}; });
  expect_bits_refused("bit_mask.row_bytes", [](Problem& p) { p.bit_mask = {BitMaskKind::keys, 2, true}; });
  expect_bits_refused("bit_mask.kind", [](Problem& p) { p.bit_mask.kind = static_cast<BitMaskKind>(3); });
}

TEST(BitMaskChecks, RefusesWhatTheyAreNotCombinedWith) {
  const auto lists = [](Problem& p) { p.key_list = {.kind = KeyListKind::keys, .entries = 9}; };
  expect_bits_refused("bit_mask", lists);
  expect_bits_refused("bit_mask", [](Problem&) {}, Pass::backward);
  expect_bits_refused("bit_mask", [](Problem&) {}, Pass::standard_forward);
  const auto windows = [](Problem& p) { p.bit_mask = {}, p.sequence_windows = true; };
  expect_bits_refused("sequence_windows", windows, Pass::backward);
  expect_bits_refused("sequence_windows", [&](Problem& p) { windows(p), lists(p); });
}

TEST(BitMaskChecks, OffsetsDoNotGoDown) {
  Problem p = with_drafts();
  p.bit_mask.offsets = true;
  const auto check = [&](const std::vector<std::int32_t>& offsets) {
    api::check_bit_mask_offsets(p, {.bit_mask_offsets = offsets.data()});
  };
  EXPECT_NO_THROW(check({3, 3, 9}));
  expect_refused("bit_mask_offsets[0]", [&] { check({-1, 3, 9}); });
  expect_refused("bit_mask_offsets[2]", [&] { check({0, 3, 2}); });
}

}  // namespace
}  // namespace flash_attention::testing
