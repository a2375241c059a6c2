#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// What is refused about pointers, and about the starts of packed sequences where the host can see them.

namespace flash_attention::api {

/// In hexadecimal.
std::string address(const void* pointer);

void check_pointer(const char* argument, const void* pointer, bool needed, std::size_t alignment);

/// A pointer that goes with a field of the Problem: both or neither; it may be null if there is `nothing` to point to.
void check_pair(const char* argument, const void* pointer, bool present, const char* field, std::size_t alignment,
                bool nothing = false);

void check_cu_seqlens(const char* argument, const std::int32_t* cu, std::int64_t batch, std::int64_t total,
                      std::int64_t longest);

}  // namespace flash_attention::api
