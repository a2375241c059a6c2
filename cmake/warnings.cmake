# Flags that all our own code is compiled with.
add_library(flash_attention_flags INTERFACE)
target_compile_options(flash_attention_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>             # GCC 12 sees overlaps in std::string that are not there
  $<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=500000>  # no collection of garbage below 500 MB: 5 to 10 % less time
  $<$<CXX_COMPILER_ID:Clang>:-Wno-overlength-strings>)  # embedded texts are as long as they are
if(FLASH_ATTENTION_WERROR)
  target_compile_options(flash_attention_flags INTERFACE -Werror)
endif()
if(FLASH_ATTENTION_SANITIZE)
  target_compile_options(flash_attention_flags INTERFACE -fsanitize=${FLASH_ATTENTION_SANITIZE} -fno-omit-frame-pointer
                         -fno-sanitize-recover=all)
  target_link_options(flash_attention_flags INTERFACE -fsanitize=${FLASH_ATTENTION_SANITIZE})
endif()
