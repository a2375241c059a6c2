# The core library. Its objects are compiled once and linked twice: into the library that users get, which exports the
# public API alone, and into a static one that tests link, which shows everything.
file(GLOB_RECURSE flash_attention_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.cpp)
list(FILTER flash_attention_sources EXCLUDE REGEX "/src/emulator/runtime/")  # compiled with each emulated kernel

include(embed_kernels)  # sets flash_attention_embedded_source
include(cpu_isa)        # per-file flags of src/cpu

include(unity)          # one unit for each room

find_package(Threads REQUIRED)
set(emulator_sources ${flash_attention_sources})
list(FILTER emulator_sources INCLUDE REGEX "/src/emulator/")
list(FILTER flash_attention_sources EXCLUDE REGEX "/src/emulator/")
add_library(flash_attention_objects OBJECT ${flash_attention_sources} ${flash_attention_embedded_source})
add_library(flash_attention_emulator OBJECT ${emulator_sources})
set(flash_attention_all_objects $<TARGET_OBJECTS:flash_attention_objects> $<TARGET_OBJECTS:flash_attention_emulator>)
foreach(objects flash_attention_objects flash_attention_emulator)
  target_include_directories(${objects}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
    PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/kernels)
  target_link_libraries(${objects} PRIVATE flash_attention_flags Threads::Threads)
endforeach()
unite(flash_attention_emulator)
if(FLASH_ATTENTION_SANITIZE AND NOT FLASH_ATTENTION_FUZZ)
  target_compile_options(flash_attention_emulator PRIVATE -fno-sanitize=all)  # no test with sanitizers runs a kernel there
endif()
unite_by_room(flash_attention_objects plan/families)  # these say the same things, each of its own kernel
if(FLASH_ATTENTION_UNITY)
  target_precompile_headers(flash_attention_objects PRIVATE
    <algorithm> <filesystem> <fstream> <functional> <map> <memory> <mutex> <optional> <string> <vector>)
  if(NOT FLASH_ATTENTION_SANITIZE)  # with other flags it is another header
    target_precompile_headers(flash_attention_emulator REUSE_FROM flash_attention_objects)
  endif()
endif()

configure_file(${PROJECT_SOURCE_DIR}/cmake/version.h.in ${PROJECT_BINARY_DIR}/include/flash_attention/version.h @ONLY)

add_library(flash_attention ${flash_attention_all_objects})
add_library(flash_attention::flash_attention ALIAS flash_attention)
target_include_directories(flash_attention PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(flash_attention PUBLIC cxx_std_20)
target_link_libraries(flash_attention PRIVATE Threads::Threads ${CMAKE_DL_LIBS} $<BUILD_INTERFACE:flash_attention_flags>)
set_target_properties(flash_attention PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})

add_library(flash_attention_internal STATIC EXCLUDE_FROM_ALL ${flash_attention_all_objects})
target_include_directories(flash_attention_internal PUBLIC
  ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/kernels)
target_link_libraries(flash_attention_internal PUBLIC Threads::Threads ${CMAKE_DL_LIBS} flash_attention_flags)
