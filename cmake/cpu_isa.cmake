# One object per instruction set: src/cpu/isa/<isa>.cpp compiles the shared algorithms of src/cpu/{prefill,decode,backward,tile}.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(flash_attention_isa_flags_avx2 -march=x86-64-v3)
  set(flash_attention_isa_flags_avx512 -march=x86-64-v4)
  set(flash_attention_isa_flags_avx512_bf16 -march=x86-64-v4 -mavx512bf16 -mavx512vbmi)
  set(flash_attention_isa_flags_amx -march=x86-64-v4 -mamx-tile -mamx-bf16 -mavx512bf16 -mavx512vbmi)
  list(FILTER flash_attention_sources EXCLUDE REGEX "/src/cpu/isa/neon.cpp$")
  # The sanitizers take minutes over each unrolled object, so they see the same algorithms once, in the generic one.
  if(FLASH_ATTENTION_SANITIZE)
    list(FILTER flash_attention_sources EXCLUDE REGEX "/src/cpu/isa/(avx2|avx512|avx512_bf16|amx).cpp$")
    add_compile_definitions(FLASH_ATTENTION_GENERIC_CPU)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  list(FILTER flash_attention_sources EXCLUDE REGEX "/src/cpu/isa/(avx2|avx512|avx512_bf16|amx).cpp$")
else()
  list(FILTER flash_attention_sources EXCLUDE REGEX "/src/cpu/isa/(avx2|avx512|avx512_bf16|amx|neon).cpp$")
endif()
# The kernels are vectorised by hand. Of what -O3 adds in g++ these make them faster, and the rest takes a third of the time
# to compile (measured on an EPYC, AVX2 and AVX-512: the same speed within 1 %, forward with dropout 2 % slower). Peeled
# loops make bfloat16 1 % faster, the others larger by a sixth and no faster.
set(flash_attention_isa_optimise -O3)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(flash_attention_isa_optimise -O2 -fvect-cost-model=dynamic)
endif()
foreach(isa generic neon avx2 avx512 avx512_bf16 amx)
  set(extra ${flash_attention_isa_optimise})
  if(isa STREQUAL generic)
    set(extra -Os)  # for CPUs that have none of the others: two thirds of -O1's size, programs up to a third slower
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND isa MATCHES "avx512_bf16|amx")
    list(APPEND extra -fpeel-loops)
  endif()
  if(FLASH_ATTENTION_SANITIZE)
    set(extra -O1)
    if(FLASH_ATTENTION_SANITIZE MATCHES "address.*undefined" AND NOT FLASH_ATTENTION_FUZZ)
      # A call instead of code at each access: 12 CPU seconds to compile, not 20.
      list(APPEND extra -fsanitize=alignment --param=asan-instrumentation-with-call-threshold=0)
    endif()
  endif()
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/cpu/isa/${isa}.cpp PROPERTIES
    SKIP_PRECOMPILE_HEADERS ON
    COMPILE_OPTIONS "${flash_attention_isa_flags_${isa}};-ffp-contract=fast;-fno-math-errno;-fno-trapping-math;${extra}")
endforeach()
