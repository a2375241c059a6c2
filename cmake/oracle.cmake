# What judges a result: the fp64 oracle, cases and their tensors, and the generator of problems of tests/fuzz. The tests and
# the command link it, so it knows no test framework.
if(TARGET flash_attention_oracle)
  return()
endif()
if(FLASH_ATTENTION_PLAIN_BUILD)
  add_library(flash_attention_oracle STATIC IMPORTED GLOBAL)
  file(GLOB_RECURSE plain_oracle ${FLASH_ATTENTION_PLAIN_BUILD}/libflash_attention_oracle.a)
  set_target_properties(flash_attention_oracle PROPERTIES IMPORTED_LOCATION ${plain_oracle})
  target_include_directories(flash_attention_oracle INTERFACE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(flash_attention_oracle INTERFACE flash_attention_internal)
  return()
endif()
file(GLOB oracle_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/support/oracle/*.cpp
     ${PROJECT_SOURCE_DIR}/tests/fuzz/generator/*.cpp)
add_library(flash_attention_oracle STATIC ${oracle_sources})
unite(flash_attention_oracle)
if(FLASH_ATTENTION_SANITIZE)
  # The library is what sanitizers are to see: without them here, 9 of 14 s less to compile, and its loops at speed.
  target_compile_options(flash_attention_oracle PRIVATE -O1 -fno-sanitize=all)
else()
  target_compile_options(flash_attention_oracle PRIVATE -O1)
  # Its loops in vectors: minutes of a test run.
  set_source_files_properties(${PROJECT_SOURCE_DIR}/tests/support/oracle/oracle.cpp PROPERTIES COMPILE_OPTIONS -O3)
  reuse_library_headers(flash_attention_oracle)
endif()
target_include_directories(flash_attention_oracle PUBLIC ${PROJECT_SOURCE_DIR}/tests)
target_link_libraries(flash_attention_oracle PUBLIC flash_attention_internal)
