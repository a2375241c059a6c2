# Turns every file below kernels/ into a string in the library, so that NVRTC and the emulator's compiler get their
# sources from memory and an installed library needs no files beside it.
file(GLOB_RECURSE flash_attention_kernel_files CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/kernels/*.h ${PROJECT_SOURCE_DIR}/kernels/*.cuh ${PROJECT_SOURCE_DIR}/kernels/*.cu)
set(flash_attention_embedded_source ${PROJECT_BINARY_DIR}/embedded_kernels.cpp)
add_custom_command(
  OUTPUT ${flash_attention_embedded_source}
  COMMAND ${CMAKE_COMMAND} -DROOT=${PROJECT_SOURCE_DIR}/kernels -DOUTPUT=${flash_attention_embedded_source}
          -P ${PROJECT_SOURCE_DIR}/cmake/write_embedded.cmake
  DEPENDS ${flash_attention_kernel_files} ${PROJECT_SOURCE_DIR}/cmake/write_embedded.cmake
  COMMENT "Embedding kernel sources")
