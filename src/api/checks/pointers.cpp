#include "api/checks/pointers.h"

#include "api/checks/refuse.h"

namespace flash_attention::api {

std::string address(const void* pointer) {
  std::string text = "0x";
  for (int shift = 60; shift >= 0; shift -= 4)
    text += "0123456789abcdef"[(reinterpret_cast<std::uintptr_t>(pointer) >> shift) & 15];
  return text;
}

void refuse_pointer(const char* argument, const void* pointer, std::size_t alignment) {
  if (pointer == nullptr) refuse(argument, "null", "the problem needs it");
  refuse(argument, address(pointer), "it must be aligned to " + std::to_string(alignment) + " bytes");
}

void refuse_alone(const char* argument, const void* pointer, const char* field) {
  refuse(argument, address(pointer), std::string("set ") + field + " in the problem, or leave the pointer null");
}

void check_cu_seqlens(const char* argument, const std::int32_t* cu, std::int64_t batch, std::int64_t total,
                      std::int64_t longest) {
  const auto entry = [argument](std::int64_t i) { return std::string(argument) + "[" + std::to_string(i) + "]"; };
  if (cu[0] != 0) refuse(entry(0), std::to_string(cu[0]), "the first sequence begins at 0");
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::int64_t length = std::int64_t{cu[i + 1]} - cu[i];
    if (length < 0)
      refuse(entry(i + 1), std::to_string(cu[i + 1]),
             "it must not be less than the entry before, " + std::to_string(cu[i]));
    if (length > longest) {
      refuse(entry(i + 1), std::to_string(cu[i + 1]),
             "a sequence of length " + std::to_string(length) + " is longer than the longest given, " +
                 std::to_string(longest));
    }
  }
  if (cu[batch] > total)
    refuse(entry(batch), std::to_string(cu[batch]), "the tensor has " + std::to_string(total) + " rows");
}

}  // namespace flash_attention::api
