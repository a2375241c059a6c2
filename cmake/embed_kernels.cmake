# Turns every file below kernels/ (and the emulator's side of them, under the prefix emulator/) into a string in the
# library, so that NVRTC and the emulator's compiler get their sources from memory and an installed library needs no
# files beside it.
set(flash_attention_embedded_endings h cuh cu cpp)
set(flash_attention_kernel_files "")
foreach(root kernels src/emulator/runtime src/cpu/ladder)
  foreach(ending ${flash_attention_embedded_endings})
    file(GLOB_RECURSE found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${root}/*.${ending})
    list(APPEND flash_attention_kernel_files ${found})
  endforeach()
endforeach()
set(flash_attention_embedded_source ${PROJECT_BINARY_DIR}/embedded_kernels.cpp)
add_custom_command(
  OUTPUT ${flash_attention_embedded_source}
  COMMAND ${CMAKE_COMMAND} -DROOT=${PROJECT_SOURCE_DIR} -DOUTPUT=${flash_attention_embedded_source}
          -P ${PROJECT_SOURCE_DIR}/cmake/write_embedded.cmake
  DEPENDS ${flash_attention_kernel_files} ${PROJECT_SOURCE_DIR}/cmake/write_embedded.cmake
  COMMENT "Embedding kernel sources" VERBATIM)
