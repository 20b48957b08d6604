# Registers a GoogleTest program with CTest: one entry for each of its test suites, found when ctest starts.  One entry per
# test would start thousands of processes; one per program could not run in parallel.
#
# attnfold_add_suites(target PREFIX name [LABELS label..] [ENVIRONMENT NAME=value..] [TIMEOUT seconds])
#
# Entries are named PREFIX/<suite>.  A suite whose name ends in Slow also gets the label `slow`.  A program that exits with 77
# was skipped as a whole, and says why.

set(attnfold_list_suites "${CMAKE_CURRENT_LIST_DIR}/list_suites.cmake")

function(attnfold_add_suites target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PREFIX;TIMEOUT" "LABELS;ENVIRONMENT")
  string(REPLACE "/" "_" file_name "${arg_PREFIX}")
  set(file "${CMAKE_CURRENT_BINARY_DIR}/${file_name}_suites.cmake")
  file(GENERATE OUTPUT "${file}" CONTENT "\
set(program [==[$<TARGET_FILE:${target}>]==])
set(prefix [==[${arg_PREFIX}]==])
set(labels [==[${arg_LABELS}]==])
set(environment [==[${arg_ENVIRONMENT}]==])
set(timeout [==[${arg_TIMEOUT}]==])
set(emulator [==[${CMAKE_CROSSCOMPILING_EMULATOR}]==])
include([==[${attnfold_list_suites}]==])
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${file}")
endfunction()
