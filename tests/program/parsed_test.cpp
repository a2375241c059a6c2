#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "flash_attention/error.h"
#include "program/program.h"

namespace flash_attention::testing {
namespace {

std::string window_of(int width) { return "v0 = sub i j\nv1 = le v0 " + std::to_string(width) + "\nvisible = v1"; }

TEST(Parsed, ATextIsParsedOnce) {
  const auto first = program::parsed(window_of(3)), again = program::parsed(window_of(3));
  EXPECT_EQ(first.get(), again.get());
  EXPECT_NE(first.get(), program::parsed(window_of(4)).get());
  EXPECT_EQ(first->nodes.size(), program::parse(window_of(3)).nodes.size());
}

TEST(Parsed, ARefusalIsNotRemembered) {
  for (int turn = 0; turn < 2; ++turn) EXPECT_THROW(program::parsed("visible = what"), Error);
}

TEST(Parsed, WhatTheMaskDependsOn) {
  const auto program = program::parsed("v0 = eq h 1\nv1 = eq b 1\nv2 = ge i j\nscore = score\nvisible = v0");
  EXPECT_TRUE(program->visible_by_head);
  EXPECT_FALSE(program->visible_by_batch);
  EXPECT_TRUE(program::parsed("v0 = eq b j\nvisible = v0")->visible_by_batch);
}

TEST(Parsed, ThreadsFindEachOthersTexts) {
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([] {
      for (int width = 100; width < 600; ++width) {
        const auto known = program::parsed(window_of(width));
        EXPECT_EQ(known->visible, program::parse(window_of(width)).visible);
        EXPECT_EQ(known->nodes.size(), 5u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(program::parsed(window_of(599)).get(), program::parsed(window_of(599)).get());
}

/// More texts than are kept: the rest are parsed each time, and are right.
TEST(Parsed, TextsWithoutEnd) {
  for (int width = 1000; width < 6000; ++width) {
    const auto known = program::parsed(window_of(width));
    bool found = false;
    for (const program::Node& node : known->nodes)
      found = found || (node.op == program::Op::literal && node.integer == width);
    ASSERT_TRUE(found) << width;
  }
}

}  // namespace
}  // namespace flash_attention::testing
