#pragma once

#include <string>

#include "emulator/machine/address.h"

namespace flash_attention::emulator {

void mbarrier_init(unsigned address, int arrivals);
void mbarrier_arrive(unsigned address, int arrivals, int bytes);  // arrive, and expect_tx where bytes is not 0
void mbarrier_init_fence();
bool mbarrier_test(unsigned address, unsigned parity);  // never waits: who asks may be the one waited for
void mbarrier_wait(unsigned address, unsigned parity);

/// Refuses an mbarrier that the asynchronous proxy cannot know of yet.
void require_visible_mbarrier(const SharedPlace& place);

/// complete_tx: bytes of an asynchronous copy have landed.
void mbarrier_complete(const SharedPlace& place, int bytes, const char* doing);

/// "phase 3: 1 of 2 arrivals, 4096 bytes are missing".
std::string describe_mbarrier(const Block& block, unsigned address);

}  // namespace flash_attention::emulator
