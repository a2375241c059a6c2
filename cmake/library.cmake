# The core library. Its objects are compiled once and linked twice: into the library that users get, which exports the
# public API alone, and into a static one that tests link, which shows everything.
file(GLOB_RECURSE flash_attention_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.cpp)
list(FILTER flash_attention_sources EXCLUDE REGEX "/src/emulator/runtime/")  # compiled with each emulated kernel

include(embed_kernels)  # sets flash_attention_embedded_source
include(embed_tuned)    # sets flash_attention_tuned_source
include(cpu_isa)        # per-file flags of src/cpu

include(unity)          # one unit for each room

find_package(Threads REQUIRED)

if(FLASH_ATTENTION_UNITY)
  # A target with nothing but a compiled header: those that use it wait for the whole target.
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/headers.cpp CONTENT "")
  add_library(flash_attention_headers OBJECT ${PROJECT_BINARY_DIR}/headers.cpp)
  target_link_libraries(flash_attention_headers PRIVATE flash_attention_flags Threads::Threads)
  target_precompile_headers(flash_attention_headers PRIVATE
    <algorithm> <filesystem> <fstream> <functional> <map> <memory> <mutex> <optional> <string> <vector>)
endif()

# add_objects(NAME REGEX): compiles the sources of that name that are left.
set(flash_attention_all_objects "")
function(add_objects name regex)
  set(sources ${flash_attention_sources})
  list(FILTER sources INCLUDE REGEX ${regex})
  list(REMOVE_ITEM flash_attention_sources ${sources})
  set(flash_attention_sources ${flash_attention_sources} PARENT_SCOPE)
  add_library(${name} OBJECT ${sources})
  target_include_directories(${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
    PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/kernels)
  target_link_libraries(${name} PRIVATE flash_attention_flags Threads::Threads)
  set(flash_attention_all_objects ${flash_attention_all_objects} $<TARGET_OBJECTS:${name}> PARENT_SCOPE)
endfunction()

# What is compiled without sanitizers in any case, or gains nothing by one, is taken from a build without, where one is named: the
# emulator, since no test with sanitizers runs a kernel there, and the oracle, which is what judges. Under the thread sanitizer rooms
# that share nothing between threads, too.
set(FLASH_ATTENTION_PLAIN_BUILD "$ENV{FLASH_ATTENTION_PLAIN_BUILD}" CACHE PATH "A build without sanitizers, for the parts that need none")
if(FLASH_ATTENTION_PLAIN_BUILD)
  set(plain_sources "/src/emulator/")
  set(plain_places "_emulator.dir/")
  if(FLASH_ATTENTION_SANITIZE MATCHES "thread")
    string(APPEND plain_sources "|/src/(plan|program|check)/")
    string(APPEND plain_places "|_cold.dir/(src/plan/|Unity/unity_plan_)|_objects.dir/(src/(program|check)/|Unity/unity_(program|check)_)")
  endif()
  file(GLOB_RECURSE plain_objects ${FLASH_ATTENTION_PLAIN_BUILD}/CMakeFiles/*.o)
  list(FILTER plain_objects INCLUDE REGEX "/flash_attention(${plain_places})")
  list(FILTER flash_attention_sources EXCLUDE REGEX "${plain_sources}")
  foreach(object ${plain_objects})
    if(NOT object MATCHES "/(src/[a-z0-9_/]+\\.cpp)\\.o$" OR EXISTS ${PROJECT_SOURCE_DIR}/${CMAKE_MATCH_1})  # else a file that is no more
      list(APPEND flash_attention_all_objects ${object})
    endif()
  endforeach()
endif()

# In the order in which Ninja begins them: the longest first, so that no core is without work at the end.
add_objects(flash_attention_cpu_kernels "/src/cpu/isa/")
if(NOT FLASH_ATTENTION_PLAIN_BUILD)
  add_objects(flash_attention_emulator "/src/emulator/")
  unite(flash_attention_emulator)
endif()
add_objects(flash_attention_cold "/src/(jit|plan|tuning)/")  # a repeated call finds its plan and its kernel made
add_objects(flash_attention_objects "/src/")
if(TARGET flash_attention_emulator AND FLASH_ATTENTION_SANITIZE AND NOT FLASH_ATTENTION_FUZZ)
  target_compile_options(flash_attention_emulator PRIVATE -fno-sanitize=all)
endif()
unite_by_room(flash_attention_objects)
unite_by_room(flash_attention_cold plan/families plan/ladder)  # these say the same things, each of its own kernel
target_sources(flash_attention_cold PRIVATE ${flash_attention_embedded_source} ${flash_attention_tuned_source})
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT FLASH_ATTENTION_SANITIZE)
  target_compile_options(flash_attention_cold PRIVATE -Og)  # 60 % of the time to compile
endif()
if(FLASH_ATTENTION_UNITY)
  target_precompile_headers(flash_attention_cold REUSE_FROM flash_attention_headers)
  target_precompile_headers(flash_attention_objects REUSE_FROM flash_attention_headers)
  if(NOT FLASH_ATTENTION_SANITIZE)  # with other flags it is another header
    target_precompile_headers(flash_attention_emulator REUSE_FROM flash_attention_headers)
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
