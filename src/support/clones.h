#pragma once

// Loops in which tests and the emulator spend their time are compiled for several instruction sets. The best one is
// chosen when the program starts. Not with the thread sanitizer: the resolver of the clones runs before its runtime is
// ready.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define FLASH_ATTENTION_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FLASH_ATTENTION_CLONES
#endif
