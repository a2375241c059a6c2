#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// What is refused about pointers, and about the starts of packed sequences where the host can see them.

namespace flash_attention::api {

/// In hexadecimal.
std::string address(const void* pointer);

/// A null pointer that is needed, or one that is not aligned.
[[noreturn]] void refuse_pointer(const char* argument, const void* pointer, std::size_t alignment);

/// Refuses a pointer that the problem needs and that is null, and one that is not aligned to so many bytes, a power of two.
inline void check_pointer(const char* argument, const void* pointer, bool needed, std::size_t alignment) {
  const bool wrong = pointer == nullptr ? needed : (reinterpret_cast<std::uintptr_t>(pointer) & (alignment - 1)) != 0;
  if (wrong) refuse_pointer(argument, pointer, alignment);
}

/// A pointer that goes with a field that is not set.
[[noreturn]] void refuse_alone(const char* argument, const void* pointer, const char* field);

/// A pointer that goes with a field of the Problem: both or neither; it may be null if there is `nothing` to point to.
inline void check_pair(const char* argument, const void* pointer, bool present, const char* field, std::size_t alignment,
                       bool nothing = false) {
  if (!present && pointer != nullptr) refuse_alone(argument, pointer, field);
  check_pointer(argument, pointer, present && !nothing, alignment);
}

void check_cu_seqlens(const char* argument, const std::int32_t* cu, std::int64_t batch, std::int64_t total,
                      std::int64_t longest);

}  // namespace flash_attention::api
