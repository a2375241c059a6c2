#pragma once

// Included before a unit whose plain accesses (`c[i] = a[i]`) must be counted. The compiler inserts a call before each,
// as for its address sanitizer. Here these calls end in the same functions as the ptx:: wrappers.

#include "prelude.h"

#define FLASH_ATTENTION_UNSEEN [[gnu::no_sanitize_address]] inline

namespace flash_attention::emulator {

/// Whether `address` is in the `bytes` that begin at `begin`.
FLASH_ATTENTION_UNSEEN bool within(const void* address, const void* begin, unsigned long bytes) {
  return reinterpret_cast<unsigned long>(address) - reinterpret_cast<unsigned long>(begin) < bytes;
}

/// Local variables and threadIdx are memory only here: on a GPU they are registers. So is the interface to the library.
FLASH_ATTENTION_UNSEEN bool is_register(const void* address) {
  constexpr unsigned long max_stack = 1 << 16;
  const char* here = static_cast<const char*>(__builtin_frame_address(0));
  return within(address, &thread, sizeof(thread)) || within(address, thread, sizeof(ThreadView)) ||
         within(address, &table, sizeof(table)) || within(address, table, sizeof(Table)) ||
         within(address, here - max_stack, 2 * max_stack);
}

FLASH_ATTENTION_UNSEEN void plain_access(bool store, const void* address, int bytes) {
  if (is_register(address)) return;
  if (within(address, thread->shared, thread->shared_bytes)) {
    const auto offset = static_cast<unsigned>(static_cast<const unsigned char*>(address) - thread->shared);
    table->access_shared(store ? Access::store_shared : Access::load_shared, shared_window + offset, bytes, nullptr);
  } else {
    table->access_global(store ? Access::store_global : Access::load_global, address, bytes);
  }
}

}  // namespace flash_attention::emulator

extern "C" {
#define FLASH_ATTENTION_ACCESS(bytes)                                                                      \
  [[gnu::no_sanitize_address, gnu::used]] inline void __asan_load##bytes##_noabort(const void* address) {  \
    flash_attention::emulator::plain_access(false, address, bytes);                                        \
  }                                                                                                        \
  [[gnu::no_sanitize_address, gnu::used]] inline void __asan_store##bytes##_noabort(const void* address) { \
    flash_attention::emulator::plain_access(true, address, bytes);                                         \
  }
FLASH_ATTENTION_ACCESS(1)
FLASH_ATTENTION_ACCESS(2)
FLASH_ATTENTION_ACCESS(4)
FLASH_ATTENTION_ACCESS(8)
FLASH_ATTENTION_ACCESS(16)
#undef FLASH_ATTENTION_ACCESS

// Sizes that no single instruction of a GPU moves are not counted.
[[gnu::no_sanitize_address, gnu::used]] inline void __asan_loadN_noabort(const void*, unsigned long) {}
[[gnu::no_sanitize_address, gnu::used]] inline void __asan_storeN_noabort(const void*, unsigned long) {}
[[gnu::no_sanitize_address, gnu::used]] inline void __asan_handle_no_return() {}
}

#undef FLASH_ATTENTION_UNSEEN
