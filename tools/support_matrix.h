// The support matrix of the README, asked of the kernel table.
#pragma once

#include <string>

#include "attnfold/attnfold.h"

namespace attnfold::tools {

/** A plain problem in the types of a row. */
attnfold_problem plain_problem(const attnfold_kernel_info& row);

/** Markdown.  A CPU row that this machine lacks is listed, and left out of the features. */
std::string support_matrix();

}  // namespace attnfold::tools
