#pragma once

/// Marks the symbols that the shared library exports. All others are hidden.
#define FLASH_ATTENTION_API __attribute__((visibility("default")))
