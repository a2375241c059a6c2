#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// Refusals of pointers, and of the starts of packed sequences if the host can see them.

namespace flash_attention::api {

/// In hexadecimal.
std::string address(const void* pointer);

/// Refuses a null pointer that is needed, or one that is not aligned.
[[noreturn]] void refuse_pointer(const char* argument, const void* pointer, std::size_t alignment);

/// Refuses a pointer that is null though the problem needs it, or that is not aligned to `alignment` bytes, a power of
/// two.
inline void check_pointer(const char* argument, const void* pointer, bool needed, std::size_t alignment) {
  const bool wrong = pointer == nullptr ? needed : (reinterpret_cast<std::uintptr_t>(pointer) & (alignment - 1)) != 0;
  if (wrong) refuse_pointer(argument, pointer, alignment);
}

/// Refuses a pointer whose field is not set.
[[noreturn]] void refuse_alone(const char* argument, const void* pointer, const char* field);

/// A pointer and a field of the Problem that belong together: both must be set, or neither. With `nothing` to point to,
/// the pointer may be null.
inline void check_pair(const char* argument, const void* pointer, bool present, const char* field, std::size_t alignment,
                       bool nothing = false) {
  if (!present && pointer != nullptr) refuse_alone(argument, pointer, field);
  check_pointer(argument, pointer, present && !nothing, alignment);
}

void check_cu_seqlens(const char* argument, const std::int32_t* cu, std::int64_t batch, std::int64_t total,
                      std::int64_t longest);

}  // namespace flash_attention::api
