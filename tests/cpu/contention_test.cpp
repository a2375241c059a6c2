#include "cpu/threads/contention.h"

#include <gtest/gtest.h>

namespace flash_attention::cpu {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Contention::Time start{seconds(100)};

TEST(Contention, FewLateTeamsSayNothing) {
  Contention contention;
  EXPECT_FALSE(contention.is_recent(start));
  for (int i = 0; i < 50; ++i) {  // seven of 16
    for (int late = 0; late < 7; ++late) contention.saw_late_team(start);
    for (int on_time = 0; on_time < 9; ++on_time) contention.saw_team();
    EXPECT_FALSE(contention.is_recent(start));
  }
}

TEST(Contention, EightLateTeamsOfSixteenGiveASecondToThePool) {
  Contention contention;
  for (int i = 0; i < 7; ++i) {
    contention.saw_late_team(start);
    contention.saw_team();
  }
  EXPECT_FALSE(contention.is_recent(start));
  contention.saw_late_team(start);
  EXPECT_TRUE(contention.is_recent(start));
  EXPECT_TRUE(contention.is_recent(start + milliseconds(999)));
  EXPECT_FALSE(contention.is_recent(start + seconds(1)));
}

TEST(Contention, AfterThatSecondOneLateTeamIsEnough) {
  Contention contention;
  for (int i = 0; i < 8; ++i) contention.saw_late_team(start);
  contention.saw_late_team(start + seconds(2));  // no team has been on time since
  EXPECT_TRUE(contention.is_recent(start + seconds(2)));
}

TEST(Contention, TeamsOnTimeEndIt) {
  Contention contention;
  for (int i = 0; i < 16; ++i) contention.saw_late_team(start);
  for (int i = 0; i < 9; ++i) contention.saw_team();
  contention.saw_late_team(start + seconds(2));
  EXPECT_FALSE(contention.is_recent(start + seconds(2)));
}

}  // namespace
}  // namespace flash_attention::cpu
