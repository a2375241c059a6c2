#pragma once

#include "emulator/runtime/interface.h"

namespace flash_attention::emulator {

// Loads, stores and cp.async of a single thread.
void access_global(Access access, const void* address, int bytes);
unsigned char* access_shared(Access access, unsigned address, int bytes, const void* value);
void spin();

// Launches that begin early: accesses that they must not make before they have waited.
void griddepcontrol_wait();
void require_launch_before(const void* address, bool writes);

/// st.async: to a block of the cluster, whose mbarrier counts the bytes.
void store_async(unsigned address, const void* value, int bytes, unsigned barrier);

void copy_async(unsigned shared, const void* global, int bytes, int valid);
void copy_async_commit();
void copy_async_wait(int pending);
void copy_async_arrive(unsigned mbarrier);

}  // namespace flash_attention::emulator
