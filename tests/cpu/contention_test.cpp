#include "cpu/threads/contention.h"

#include <gtest/gtest.h>

namespace flash_attention::cpu {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Contention::Time start{seconds(100)};

TEST(Contention, OneLateTeamSaysNothing) {
  Contention contention;
  EXPECT_FALSE(contention.is_recent(start));
  for (int i = 0; i < 5; ++i) {
    contention.saw_late_team(start);
    EXPECT_FALSE(contention.is_recent(start));
    for (int j = 0; j < 15; ++j) contention.saw_team();
  }
}

TEST(Contention, TwoLateTeamsOfSixteenGiveASecondToThePool) {
  Contention contention;
  contention.saw_late_team(start);
  for (int j = 0; j < 14; ++j) contention.saw_team();
  contention.saw_late_team(start);
  EXPECT_TRUE(contention.is_recent(start));
  EXPECT_TRUE(contention.is_recent(start + milliseconds(999)));
  EXPECT_FALSE(contention.is_recent(start + seconds(1)));
}

TEST(Contention, AfterThatSecondOneLateTeamIsEnough) {
  Contention contention;
  contention.saw_late_team(start);
  contention.saw_late_team(start);
  contention.saw_late_team(start + seconds(2));  // no team has been on time since
  EXPECT_TRUE(contention.is_recent(start + seconds(2)));
}

}  // namespace
}  // namespace flash_attention::cpu
