#pragma once

/// Marks what the shared library exports; everything else is hidden.
#define FLASH_ATTENTION_API __attribute__((visibility("default")))
