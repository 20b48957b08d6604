# The example in the README is examples/decode.cpp, to the letter.
file(READ "${README}" readme)
file(READ "${EXAMPLE}" example)
string(FIND "${readme}" "```cpp\n${example}```" at)
if(at EQUAL -1)
  message(FATAL_ERROR "README.md: expected the text of ${EXAMPLE} between ```cpp and ```, got another or none")
endif()
