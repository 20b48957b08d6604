# An example stands in a text to the letter.
file(READ "${TEXT}" text)
file(READ "${EXAMPLE}" example)
string(FIND "${text}" "```cpp\n${example}```" at)
if(at EQUAL -1)
  message(FATAL_ERROR "${TEXT}: expected the text of ${EXAMPLE} between ```cpp and ```, got another or none")
endif()
