#pragma once

#include <string>

#include "emulator/machine/address.h"

namespace flash_attention::emulator {

void mbarrier_init(unsigned address, int arrivals);
void mbarrier_arrive(unsigned address, int arrivals, int bytes);  // arrives, and expects bytes if `bytes` is not 0
void mbarrier_init_fence();
// never waits: the thread that asks may be the one that others wait for
bool mbarrier_test(unsigned address, unsigned parity);
void mbarrier_wait(unsigned address, unsigned parity);

/// Refuses an mbarrier that is not yet visible to the asynchronous proxy.
void require_visible_mbarrier(const SharedPlace& place);

/// complete_tx: bytes of an asynchronous copy have landed.
void mbarrier_complete(const SharedPlace& place, int bytes, const char* doing);

/// One arrival of products or copies that are done. `known` is what it passes on.
void mbarrier_arrive_later(const SharedPlace& place, const Clocks& known, const char* doing);

/// "phase 3: 1 of 2 arrivals, 4096 bytes are missing".
std::string describe_mbarrier(const Block& block, unsigned address);

}  // namespace flash_attention::emulator
