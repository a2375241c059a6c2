# Flags that all our own code is compiled with.
add_library(flash_attention_flags INTERFACE)
target_compile_options(flash_attention_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>             # GCC 12 sees overlaps in std::string that are not there
  $<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=500000>  # no collection of garbage below 500 MB: 5 to 10 % less time
  $<$<CXX_COMPILER_ID:Clang>:-Wno-overlength-strings>)  # embedded texts are as long as they are
if(FLASH_ATTENTION_WERROR)
  target_compile_options(flash_attention_flags INTERFACE -Werror)
endif()
# For the folder and not by the interface, whose options come last: a target may take some away again.
if(FLASH_ATTENTION_SANITIZE)
  add_compile_options(-fsanitize=${FLASH_ATTENTION_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  if(FLASH_ATTENTION_SANITIZE MATCHES "address.*undefined" AND NOT FLASH_ATTENTION_FUZZ)
    # A third of the time to compile. The address sanitizer finds wild and null pointers as well; alignment is checked where
    # pointers of users are read: cmake/cpu_isa.cmake.
    add_compile_options(-fno-sanitize=null,alignment,object-size,pointer-overflow)
  endif()
  add_link_options(-fsanitize=${FLASH_ATTENTION_SANITIZE})
endif()
