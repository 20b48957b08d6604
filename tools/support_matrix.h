// The support matrix of the README, asked of the kernel table.
#pragma once

#include <string>

namespace attnfold::tools {

/** Markdown.  Does not depend on the machine: rows that it cannot run are listed too. */
std::string support_matrix();

}  // namespace attnfold::tools
