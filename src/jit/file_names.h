#pragma once

#include <filesystem>
#include <string>

#include "jit/product.h"

namespace flash_attention::jit {

/// "STEM-CONTENT-": how the file names of a recipe begin, whichever compiler it is for.
std::string name_beginning(const Recipe& recipe);

/// "STEM-CONTENT-COMPILER.KIND", with hashes of 32 and 8 hexadecimal digits.
std::string file_name(const Recipe& recipe);

/// The source of a kernel that does not compile: "STEM-failed.cu".
std::string failed_source_name(const std::string& stem);

/// The first digits of the text's SHA-256.
std::string digest(std::string_view text, std::size_t digits);

// By name alone, which is all that may be asked before a file is removed: whatever else is in the folder is not ours.
bool is_product(const std::filesystem::path& path);
bool is_ours(const std::filesystem::path& path);  // a product, its source, a failed source, or a temporary of one of them

}  // namespace flash_attention::jit
