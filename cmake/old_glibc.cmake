# link_for_old_glibc(TARGET): the shared object loads with glibc 2.28 and any C++ library, whatever this machine has. The C++
# library is linked statically, and every function of glibc that is newer goes by old_glibc.c. libgcc_s stays shared: there
# is one unwinder in a process, and each Linux has it.
function(link_for_old_glibc target)
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|aarch64)$")
    message(FATAL_ERROR "FLASH_ATTENTION_OLD_GLIBC: is for Linux on x86_64 and aarch64, this is ${CMAKE_SYSTEM_NAME} on ${CMAKE_SYSTEM_PROCESSOR}")
  endif()
  set(source ${PROJECT_SOURCE_DIR}/cmake/old_glibc.c)
  file(STRINGS ${source} lines REGEX "^(FORWARD|HIDDEN)")
  set(options "")
  foreach(line ${lines})
    if(line MATCHES "(^FORWARD[(]|^FORWARD_RENAMED[(]|__wrap_)([A-Za-z0-9_]+)")
      list(APPEND options "LINKER:--wrap=${CMAKE_MATCH_2}")
    endif()
  endforeach()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
  target_sources(${target} PRIVATE ${source})
  # Until glibc 2.34 threads and dlopen lived in libraries of their own; here those are empty, and named nevertheless.
  target_link_options(${target} PRIVATE ${options} -static-libstdc++ LINKER:--push-state,--no-as-needed
                      -l:libpthread.so.0 -l:libdl.so.2 LINKER:--pop-state)
endfunction()
