# What every target of this project is compiled and linked with.

find_package(Threads REQUIRED)

# Contraction is off because a fused a*b+c is written as fma where it is meant: a compiler that chooses would choose
# differently per file, and bits would depend on it.
function(attnfold_configure target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  set(options -ffp-contract=off -fno-math-errno -Wall -Wextra $<$<BOOL:${ATTNFOLD_WERROR}>:-Werror>
      # gcc 12 sees overlaps inside its own std::string that cannot be
      $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
      # gcc tells that gcc before 10.1 passed some arguments otherwise
      $<$<AND:$<CXX_COMPILER_ID:GNU>,$<STREQUAL:${CMAKE_SYSTEM_PROCESSOR},aarch64>>:-Wno-psabi>)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:${options}>)
  if(ATTNFOLD_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${ATTNFOLD_SANITIZE} -fno-omit-frame-pointer)
    if(ATTNFOLD_SANITIZE MATCHES "undefined")
      # A C caller may put any int into an enum, and is told so; without -fstrict-enums gcc and clang give it a meaning.
      target_compile_options(${target} PRIVATE -fno-sanitize-recover=undefined -fno-sanitize=enum)
    endif()
    # gcc 13.2, where this check is on by default, misaligns variables of 64 bytes (zmm) on the check's own stack.
    if(ATTNFOLD_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${target} PRIVATE "SHELL:--param asan-use-after-return=0")
    endif()
    target_link_options(${target} PUBLIC -fsanitize=${ATTNFOLD_SANITIZE})
  endif()
endfunction()

# What an archive or shared library of the objects needs at link time.
function(attnfold_link_runtime target)
  target_link_libraries(${target} PRIVATE Threads::Threads)
  if(ATTNFOLD_CUDA)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  endif()
  if(ATTNFOLD_SANITIZE)
    target_link_options(${target} PUBLIC $<BUILD_INTERFACE:-fsanitize=${ATTNFOLD_SANITIZE}>)
  endif()
endfunction()
