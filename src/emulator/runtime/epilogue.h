#pragma once

// Included after every emulated unit. Calls its kernel with a parameter of any type. It is a separate file because
// `kernel` must be declared before it.

extern "C" __attribute__((visibility("default"))) void flash_attention_set_table(
    const flash_attention::emulator::Table* table) {
  flash_attention::emulator::table = table;
}

extern "C" __attribute__((visibility("default"))) const flash_attention::emulator::ThreadView**
flash_attention_thread_slot() {
  return &flash_attention::emulator::thread;
}

extern "C" __attribute__((visibility("default"))) void flash_attention_run(const void* argument) {
  flash_attention::emulator::call(kernel, argument);
}
