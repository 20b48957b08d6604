// The support matrix of the README, asked of the kernel table.
#pragma once

#include <string>

namespace attnfold::tools {

/** Markdown.  A row that this machine cannot run is listed, and serves nothing. */
std::string support_matrix();

}  // namespace attnfold::tools
