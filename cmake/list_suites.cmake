# Read by ctest as it starts; see AttnfoldSuites.cmake, which sets program, prefix, labels, environment, timeout and emulator.

if(NOT EXISTS "${program}")
  add_test("${prefix}/NOT_BUILT" "${program}")
  return()
endif()
execute_process(COMMAND ${emulator} "${program}" --gtest_list_tests OUTPUT_VARIABLE listing RESULT_VARIABLE result ERROR_VARIABLE errors)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${program} --gtest_list_tests: exit status ${result}\n${listing}${errors}")
endif()

# Suites stand at the start of a line and end in a dot; a type parameter may follow as a comment.
string(REGEX MATCHALL "(^|\n)[A-Za-z0-9_/]+\\." suites "${listing}")
foreach(suite IN LISTS suites)
  string(REGEX REPLACE "[\n.]" "" suite "${suite}")
  set(suite_labels ${labels})
  if(suite MATCHES "Slow$")
    list(APPEND suite_labels slow)
  endif()
  add_test("${prefix}/${suite}" ${emulator} "${program}" "--gtest_filter=${suite}.*" --gtest_brief=1)
  set_tests_properties("${prefix}/${suite}" PROPERTIES
    LABELS "${suite_labels}" ENVIRONMENT "${environment}" TIMEOUT "${timeout}" SKIP_RETURN_CODE 77)
endforeach()
