#pragma once

#include <filesystem>
#include <string>

#include "jit/product.h"

namespace flash_attention::jit {

/// "STEM-CONTENT-": the beginning of a recipe's file names, for any compiler.
std::string name_beginning(const Recipe& recipe);

/// "STEM-CONTENT-COMPILER.KIND", with hashes of 32 and 8 hexadecimal digits.
std::string file_name(const Recipe& recipe);

/// The source of a kernel that does not compile: "STEM-failed.cu".
std::string failed_source_name(const std::string& stem);

/// The first digits of the text's SHA-256.
std::string digest(std::string_view text, std::size_t digits);

// These test names only, which is all that may be tested before a file is removed. Other files in the folder are not
// ours.
bool is_product(const std::filesystem::path& path);
bool is_ours(const std::filesystem::path& path);  // a product, its source, a failed source, or a temporary of one of them

}  // namespace flash_attention::jit
